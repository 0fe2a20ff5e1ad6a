// The list of ops: of however many rows only those that can be seen are in the page.

/** Browsers cut elements that are higher than some 33 million pixels. */
const TALLEST = 16_000_000;
const SPARE = 8;

class OpList {
  /** @param chosen called with the row that was chosen. */
  constructor(rows, chosen) {
    this.rows = rows;
    this.onChosen = chosen;
    this.box = document.getElementById("list");
    this.space = document.getElementById("space");
    this.view = document.getElementById("visible");
    this.grid = document.getElementById("grid");
    this.places = Uint32Array.from({ length: rows.length }, (_, i) => i);
    this.selected = -1; // a place in `places`
    const digits = countText(Math.max(...["left", "right"].map((side) => rows[side].seqs.at(-1) ?? 0))).length;
    this.grid.style.setProperty("--digits", `${Math.max(5, digits)}ch`);
    this.box.addEventListener("scroll", () => this.soon(), { passive: true });
    this.view.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.choose(Number(row.dataset.place));
    });
    new ResizeObserver(() => this.measure()).observe(this.box);
    this.measure();
  }

  get row() { return this.selected < 0 ? -1 : this.places[this.selected]; }

  /** Show these rows; the chosen one stays chosen if it is among them. */
  show(places) {
    const row = this.row;
    this.places = places;
    this.selected = row < 0 ? -1 : this.placeOf(row);
    this.grid.setAttribute("aria-rowcount", String(places.length + 1));
    this.measure();
    if (this.selected >= 0) this.bringIntoView();
    else this.box.scrollTop = 0;
    this.paint();
  }

  placeOf(row) {
    let low = 0, high = this.places.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (this.places[middle] === row) return middle;
      if (this.places[middle] < row) low = middle + 1; else high = middle - 1;
    }
    return -1;
  }

  measure() {
    this.height = parseFloat(getComputedStyle(this.box).getPropertyValue("--row")) || 24;
    const whole = this.places.length * this.height;
    const tall = Math.min(whole, TALLEST);
    this.space.style.height = `${tall}px`;
    const room = this.box.clientHeight;
    // of a longer list each pixel of the scroll bar stands for more than one of the list
    this.scale = whole > TALLEST ? (whole - room) / (tall - room) : 1;
    this.perPage = Math.max(1, Math.floor(room / this.height));
    this.paint();
  }

  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.paint(); });
  }

  paint() {
    const top = this.box.scrollTop;
    const first = Math.max(0, Math.floor((top * this.scale) / this.height) - SPARE);
    const last = Math.min(this.places.length, first + this.perPage + 2 * SPARE + 1);
    const shift = top - top * this.scale; // where the list is longer than the space it has
    const fragment = document.createDocumentFragment();
    for (let place = first; place < last; place++) {
      const line = this.line(place);
      line.style.transform = `translateY(${place * this.height + shift}px)`;
      fragment.append(line);
    }
    this.view.replaceChildren(fragment);
    if (this.selected >= first && this.selected < last) {
      this.grid.setAttribute("aria-activedescendant", `row-${this.places[this.selected]}`);
    } else this.grid.removeAttribute("aria-activedescendant");
  }

  line(place) {
    const row = this.places[place], rows = this.rows;
    const [side, op] = rows.either(row);
    const left = rows.op("left", row), right = rows.op("right", row);
    const mark = rows.mark(row);
    const line = made("div", "row");
    line.id = `row-${row}`;
    line.dataset.place = String(place);
    line.dataset.mark = mark;
    line.setAttribute("role", "row");
    line.setAttribute("aria-rowindex", String(place + 2));
    line.setAttribute("aria-selected", String(place === this.selected));
    if (row === facts.focus) line.classList.add("focus");
    const cells = [
      ["mark", mark], ["seq", left < 0 ? "" : countText(rows.left.seq(left))],
      ["seq", right < 0 ? "" : countText(rows.right.seq(right))],
      ["op", side.op(op).replace(/\.default$/, "")], ["module", side.path(op) || "(root)"],
      ["output", side.output(op)], ["size", sizeText(rows.sizes[row])],
    ];
    for (const [name, text] of cells) {
      const cell = made("span", name, name === "module" ? "" : text);
      if (name === "module") cell.append(made("bdi", "", text)); // cut at its beginning: the end tells more
      cell.setAttribute("role", "gridcell");
      if (name === "mark") cell.title = rows.meaning(row);
      if (name === "op" || name === "module") cell.title = text;
      line.append(cell);
    }
    const name = line.querySelector(".op");
    if (rows.otherKernel(row)) name.prepend(tag("kernel", "the two runs ran other kernels"), " ");
    if (row === facts.focus) name.prepend(tag("first", "the first divergence"), " ");
    return line;
  }

  /** Choose a place of the list, and scroll to it. */
  choose(place) {
    if (!this.places.length) return;
    this.selected = Math.max(0, Math.min(this.places.length - 1, place));
    this.bringIntoView();
    this.paint();
    this.onChosen(this.row);
  }

  /** Choose the next place from the chosen one on whose row passes; stay where none does. */
  seek(step, passes) {
    for (let place = this.selected + step; place >= 0 && place < this.places.length; place += step) {
      if (passes(this.places[place])) return this.choose(place);
    }
    return undefined;
  }

  bringIntoView() {
    const room = this.box.clientHeight;
    const above = this.box.scrollTop * this.scale;
    const top = this.selected * this.height;
    if (top >= above && top + this.height <= above + room) return;
    const near = Math.abs(top - above) < room + 2 * this.height;
    const wanted = near ? (top < above ? top : top + this.height - room) : top - room / 3;
    this.box.scrollTop = Math.max(0, wanted) / this.scale;
  }
}

function tag(word, meaning) {
  const element = made("span", `tag ${word}`, word);
  element.title = meaning;
  return element;
}
