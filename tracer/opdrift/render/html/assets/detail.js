// Both sides of the chosen op: where, on what, from where its inputs came, which kernel ran and why.

/** Fill the panel; `follow(row)` is called where a link to another op is clicked. */
function showDetail(rows, row, follow) {
  const panel = document.getElementById("detail");
  const [left, right] = rows.both(row);
  const [side, op] = rows.either(row);
  const paired = left >= 0 && right >= 0;
  const title = made("h3", "", side.op(op).replace(/\.default$/, ""));
  const size = rows.sizes[row];
  const status = made("p", "status", `${rows.mark(row)} ${rows.meaning(row)}`);
  if (!Number.isNaN(size)) status.textContent += `, differs by ${sizeText(size)}`;
  status.dataset.mark = rows.mark(row);
  const table = made("table", "sides");
  const head = table.createTHead().insertRow();
  for (const text of ["", ...(paired ? ["left", "right"] : [`${side.name} only`])]) {
    const cell = made("th", "", text);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  const both = paired ? [[rows.left, left], [rows.right, right]] : [[side, op]];
  const put = (label, tell, missing = "") => { // `missing` stands where only the other run has any
    const found = both.map(([run, index]) => tell(run, index));
    if (found.every((cell) => !cell || (Array.isArray(cell) && !cell.length))) return;
    const cells = found.map((cell) => cell || missing);
    const line = body.insertRow();
    const heading = made("th", "", label);
    heading.scope = "row";
    line.append(heading);
    const differs = paired && label !== "number" && textOf(cells[0]) !== textOf(cells[1]);
    if (differs) line.className = "differs";
    if (paired && !differs && label !== "number") { // said once, over both columns
      const cell = filled(line.insertCell(), cells[0]);
      cell.colSpan = 2;
      return;
    }
    for (const cell of cells) filled(line.insertCell(), cell);
    if (differs) heading.append(made("span", "quiet", " differ"));
  };
  put("number", (run, i) => countText(run.seq(i)));
  if (paired && rows.left.op(left) !== rows.right.op(right)) put("op", (run, i) => run.op(i));
  put("module", (run, i) => (run.path(i) || "(root)") + (run.call(i) ? `, call ${run.call(i) + 1}` : ""));
  put("source", (run, i) => run.source(i));
  put("ran", (run, i) => run.state(i));
  put("arguments", (run, i) => run.arguments(i), "none given");
  put("output", (run, i) => run.output(i));
  put("inputs", (run, i) => run.inputs(i).map((from) => inputLine(rows, run, from, follow)));
  put("kernel", (run, i) => run.pick(i));
  const link = made("a", "", `link to this op: #${rows.address(row)}`);
  link.href = `#${rows.address(row)}`;
  const hint = made("p", "quiet", rows.lone[row]
    ? "The other run computes this in other ops; shown is the first of them."
    : "What is the same in both runs stands over both columns.");
  panel.replaceChildren(title, status, table, ...(paired ? [hint] : []), link);
}

function filled(cell, content) {
  if (!Array.isArray(content)) cell.textContent = content;
  else {
    const list = made("ul");
    for (const entry of content) {
      const item = made("li");
      item.append(entry);
      list.append(item);
    }
    cell.append(list);
  }
  return cell;
}

function textOf(content) {
  if (!Array.isArray(content)) return content;
  return content.map((entry) => (entry instanceof Node ? entry.dataset.same : entry)).join("\n");
}

/** An input: the op that made it, as a link with its status, or a leaf's name. */
function inputLine(rows, run, from, follow) {
  const line = made("span");
  if (from.op === undefined) {
    line.textContent = from.leaf ?? "a value without a name";
    line.dataset.same = line.textContent;
    return line;
  }
  const row = rows.rowOf(run.name, from.op);
  const link = made("a", "", `op ${countText(run.seq(from.op))}`);
  link.href = `#${run.name === "left" ? "" : "right-"}op-${run.seq(from.op)}`;
  link.addEventListener("click", (event) => { event.preventDefault(); follow(row); });
  line.append(`${rows.mark(row)} `, link, ` ${run.op(from.op).replace(/\.default$/, "")}`);
  line.dataset.same = String(row);
  return line;
}
