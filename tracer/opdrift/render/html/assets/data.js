// What the page holds: texts and facts as JSON, and the columns of the list of ops as one compressed block.

const facts = JSON.parse(document.getElementById("facts").textContent);

const ARRAYS = {
  int32: Int32Array, uint32: Uint32Array, uint16: Uint16Array, uint8: Uint8Array, float64: Float64Array,
};

/** The columns by name, as typed arrays on one buffer; steps from row to row are added up. */
async function readColumns() {
  const element = document.getElementById("columns");
  const packed = bytesOf(element.textContent);
  element.textContent = ""; // a million ops are megabytes that nobody needs twice
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const columns = {};
  let offset = 0;
  for (const [name, type, length] of facts.columns) {
    const Type = ARRAYS[type];
    columns[name] = new Type(buffer, offset, length);
    offset += length * Type.BYTES_PER_ELEMENT;
  }
  for (const name of ["left", "right", "left.seq", "right.seq"]) addUp(columns[name]);
  return columns;
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function addUp(steps) {
  for (let i = 1; i < steps.length; i++) steps[i] += steps[i - 1];
}

const LEFT_ONLY = 1;
const RIGHT_ONLY = 2;

/** One run's ops: what the columns say of an op, in words. */
class Side {
  constructor(name, columns) {
    this.name = name;
    this.facts = facts[name];
    this.column = (key) => columns[`${name}.${key}`];
    this.seqs = this.column("seq");
    this.signatures = this.column("signature");
    this.pathIds = this.column("path");
    this.outputs = this.column("output");
    this.picks = this.column("pick");
  }

  text(list, id) { return facts.strings[this.facts[list][id]]; }
  seq(op) { return this.seqs[op]; }
  op(op) { return this.text("names", this.signatures[op]); }
  arguments(op) { return this.text("arguments", this.signatures[op]); }
  path(op) { return this.text("paths", this.pathIds[op]); }
  output(op) { return this.text("outputs", this.outputs[op]); }
  source(op) { return this.text("sources", this.column("source")[op]); }
  state(op) { return this.text("states", this.column("state")[op]); }
  call(op) { return this.column("call")[op]; }

  /** Lines on the kernel: what ran and why, then what was refused. */
  pick(op) { return this.facts.picks[this.picks[op]].map((id) => facts.strings[id]); }

  /** Where each input came from: {op: index} of this run, or {leaf: name}, or {} where it is not known. */
  inputs(op) {
    this.starts ??= running(this.column("inputs"));
    const found = [];
    for (let i = this.starts[op]; i < this.starts[op + 1]; i++) {
      const from = this.column("from")[i];
      if (from > 0) found.push({ op: op - from });
      else found.push(from < 0 ? { leaf: facts.strings[-from] } : {});
    }
    return found;
  }

  /** The index of the op with this number; -1 where there is none. */
  indexOf(seq) {
    let low = 0, high = this.seqs.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (this.seqs[middle] === seq) return middle;
      if (this.seqs[middle] < seq) low = middle + 1; else high = middle - 1;
    }
    return -1;
  }
}

function running(lengths) {
  const starts = new Uint32Array(lengths.length + 1);
  for (let i = 0; i < lengths.length; i++) starts[i + 1] = starts[i] + lengths[i];
  return starts;
}

/** Both runs in one order, row by row. */
class Rows {
  constructor(columns) {
    this.length = facts.rows;
    this.marks = columns.mark;
    this.sizes = columns.size;
    this.lone = columns.lone;
    this.ops = { left: columns.left, right: columns.right };
    this.left = new Side("left", columns);
    this.right = new Side("right", columns);
    this.partners = new Map(facts.together.flatMap(([a, b]) => [[a, b], [b, a]]));
  }

  /** The op of a row in a run, -1 where it has none. */
  op(side, row) {
    return this.lone[row] === (side === "left" ? RIGHT_ONLY : LEFT_ONLY) ? -1 : this.ops[side][row];
  }

  mark(row) { return facts.marks[this.marks[row]][0]; }
  meaning(row) { return facts.marks[this.marks[row]][1]; }

  /** The run whose op stands for the row, and that op. */
  either(row) {
    const left = this.op("left", row);
    return left >= 0 ? [this.left, left] : [this.right, this.op("right", row)];
  }

  /** The ops of both runs in a row; of ops without a counterpart, the one that stands for it in the other run. */
  both(row) {
    const partner = this.partners.get(row);
    const other = partner === undefined ? row : partner;
    const left = this.op("left", row), right = this.op("right", row);
    return [left < 0 ? this.op("left", other) : left, right < 0 ? this.op("right", other) : right];
  }

  /** Whether the two runs are known to have run other kernels. */
  otherKernel(row) {
    const [a, b] = this.both(row);
    const left = a < 0 ? 0 : this.left.picks[a], right = b < 0 ? 0 : this.right.picks[b];
    if (!left || !right) return false;
    return this.left.facts.kernels[left] !== this.right.facts.kernels[right];
  }

  /** The row of an op of a run. */
  rowOf(side, op) {
    if (!this.places) this.places = { left: this.placesOf("left"), right: this.placesOf("right") };
    return this.places[side][op];
  }

  placesOf(side) {
    const places = new Int32Array(this[side].seqs.length).fill(-1);
    for (let row = 0; row < this.length; row++) {
      const op = this.op(side, row);
      if (op >= 0) places[op] = row;
    }
    return places;
  }

  /** The part of the address that leads to a row, and back. */
  address(row) {
    const [side, op] = this.either(row);
    return `${side.name === "left" ? "" : "right-"}op-${side.seq(op)}`;
  }

  rowAt(address) {
    const found = /^(right-)?op-(\d+)$/.exec(address);
    if (!found) return -1;
    const name = found[1] ? "right" : "left";
    const op = this[name].indexOf(Number(found[2]));
    return op < 0 ? -1 : this.rowOf(name, op);
  }
}

/** A difference in two or three digits, as the reports write it. */
function sizeText(number) {
  if (Number.isNaN(number)) return "";
  if (!Number.isFinite(number)) return "inf";
  if (number >= 0.01 && number < 1000) return String(Number(number.toPrecision(number < 10 ? 2 : 3)));
  return number.toExponential(1).replace(".0e", "e").replace("e+", "e");
}

function countText(number) { return number.toLocaleString("en-US"); }

/** An element with a class and a text. */
function made(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}
