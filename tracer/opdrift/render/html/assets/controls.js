// Theme, help, and buttons that copy commands.

const THEMES = ["system", "light", "dark"];

/** A page opened from a file may be refused its storage: then the theme lasts as long as the page. */
function stored(theme) {
  try {
    if (theme === undefined) return localStorage.getItem("opdrift-theme");
    localStorage.setItem("opdrift-theme", theme);
  } catch { /* refused */ }
  return null;
}

function setUpTheme() {
  const button = document.getElementById("theme");
  const apply = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `theme: ${theme}`;
    document.dispatchEvent(new Event("themechange"));
  };
  let theme = THEMES.includes(stored()) ? stored() : "system";
  apply(theme);
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    stored(theme);
    apply(theme);
  });
}

function setUpHelp() {
  const button = document.getElementById("help-button");
  button.hidden = false;
  button.addEventListener("click", () => document.getElementById("help").showModal());
}

function setUpCopying() {
  if (!navigator.clipboard) return;
  for (const command of document.querySelectorAll(".command")) {
    const button = made("button", "copy", "copy");
    button.type = "button";
    button.setAttribute("aria-label", `copy: ${command.textContent}`);
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command.firstChild.textContent);
      button.textContent = "copied";
    });
    command.append(button);
  }
}

/** What is folded is printed unfolded, but for the histories of the leaves, which would fill dozens of sheets. */
function setUpPrinting() {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("section:not(#parameters) details:not([open])")];
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => { for (const fold of opened) fold.open = false; });
}

/** A key that is pressed while something is typed means what is typed. */
function isTyping(event) {
  return event.target.matches("input[type=search], textarea") || document.getElementById("help").open;
}

/** What each key does, by the name that the browser gives it. */
function setUpKeys(list, rows) {
  const begins = (row) => "x-+".includes(rows.mark(row));
  const actions = {
    j: () => list.choose(list.selected + 1),
    k: () => list.choose(list.selected - 1),
    n: () => list.seek(1, begins),
    p: () => list.seek(-1, begins),
    f: () => list.choose(Math.max(0, list.placeOf(facts.focus ?? 0))),
    Home: () => list.choose(0),
    End: () => list.choose(list.places.length - 1),
    PageDown: () => list.choose(list.selected + list.perPage),
    PageUp: () => list.choose(list.selected - list.perPage),
    Enter: () => { if (document.activeElement === list.grid) document.getElementById("detail").focus(); else return false; return true; },
    "/": () => document.getElementById("scope-filter").focus(),
    "?": () => document.getElementById("help").showModal(),
  };
  const scrolling = ["Home", "End", "PageDown", "PageUp", "ArrowDown", "ArrowUp"];
  actions.ArrowDown = actions.j;
  actions.ArrowUp = actions.k;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
    const inList = document.getElementById("ops").contains(document.activeElement);
    if (scrolling.includes(event.key) && !inList) return; // the page scrolls
    if (["j", "k", "n", "p", "f"].includes(event.key)) toList(list);
    if (actions[event.key] && actions[event.key]() !== false) event.preventDefault();
  });
}

function toList(list) {
  if (document.activeElement !== list.grid) list.grid.focus({ preventScroll: true });
  const box = list.box.getBoundingClientRect();
  if (box.top < 0 || box.top > innerHeight / 2) document.getElementById("ops").scrollIntoView();
}
