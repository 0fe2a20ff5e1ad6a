// Where the page begins: what needs no ops first, then the list, the plot and the keys.

function setUpFilter(list, rows) {
  const form = document.getElementById("filter");
  const count = document.getElementById("count");
  const boxes = [...form.querySelectorAll(".mark-filter")];
  const present = new Set();
  for (let row = 0; row < rows.length && present.size < facts.marks.length; row++) present.add(rows.marks[row]);
  boxes.forEach((box, code) => { box.closest("label").hidden = !present.has(code); });
  const kernel = document.getElementById("kernel-filter");
  const apply = () => {
    const scope = document.getElementById("scope-filter"), op = document.getElementById("op-filter");
    const found = filtered(rows, {
      scope: scope.value, op: op.value, marks: boxes.map((box) => box.checked), kernel: kernel.checked,
    });
    list.show(found);
    const all = found.length === rows.length;
    count.textContent = all ? `${countText(rows.length)} ops` : `${countText(found.length)} of ${countText(rows.length)} ops`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("reset", () => setTimeout(apply)); // after the fields are empty
  form.addEventListener("submit", (event) => { event.preventDefault(); list.grid.focus(); });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (event.target.value && event.target.type === "search") event.target.value = "";
    else list.grid.focus();
    apply();
    event.preventDefault();
  });
  apply();
  return form;
}

/** Show a row that the filter may hide. */
function reveal(list, form, row) {
  if (list.placeOf(row) < 0) {
    form.reset();
    list.show(Uint32Array.from({ length: facts.rows }, (_, i) => i));
  }
  list.choose(list.placeOf(row));
}

async function setUpOps() {
  const rows = new Rows(await readColumns());
  let form = null;
  let list = null;
  const follow = (row) => reveal(list, form, row);
  list = new OpList(rows, (row) => {
    showDetail(rows, row, follow);
    history.replaceState(null, "", `#${rows.address(row)}`);
  });
  form = setUpFilter(list, rows);
  const goTo = (row) => { follow(row); toList(list); };
  const arrive = () => {
    const row = rows.rowAt(location.hash.slice(1));
    if (row >= 0) goTo(row);
    return row >= 0;
  };
  addEventListener("hashchange", arrive);
  // a link to the op that is chosen already changes no address
  document.addEventListener("click", (event) => {
    const link = event.target.closest("main a[href^='#op-'], main a[href^='#right-op-']");
    if (!link || event.defaultPrevented) return;
    const row = rows.rowAt(link.hash.slice(1));
    if (row >= 0) { event.preventDefault(); goTo(row); }
  });
  setUpKeys(list, rows);
  drawPlot(rows, goTo);
  if (!arrive() && rows.length) {
    const start = facts.focus ?? 0;
    list.selected = start;
    list.bringIntoView();
    list.paint();
    showDetail(rows, start, follow);
  }
  document.documentElement.dataset.ready = "true";
  performance.mark("usable");
}

setUpTheme();
setUpCopying();
setUpPrinting();
if (facts) {
  setUpHelp();
  setUpOps().catch((error) => {
    document.getElementById("count").textContent = `The list of ops cannot be shown: ${error.message}`;
    throw error;
  });
}
