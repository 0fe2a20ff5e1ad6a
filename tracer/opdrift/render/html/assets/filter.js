// Which rows of the list are shown: by module, by op, by status, by kernel.

/** A test for texts: `*` stands for anything; without one, a part of the text is enough. */
function matcher(pattern) {
  const wanted = pattern.trim().toLowerCase();
  if (!wanted) return null;
  if (!wanted.includes("*")) return (text) => text.toLowerCase().includes(wanted);
  const parts = wanted.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"));
  const expression = new RegExp(`^${parts.join(".*")}$`);
  return (text) => expression.test(text.toLowerCase());
}

/** For each text of a list whether it matches: the ops only look it up. */
function accepted(side, list, matches) {
  return Uint8Array.from(side.facts[list], (id) => (matches(facts.strings[id] || "(root)") ? 1 : 0));
}

/** The rows that fit, in order. */
function filtered(rows, { scope, op, marks, kernel }) {
  const tests = [["paths", "pathIds", matcher(scope)], ["names", "signatures", matcher(op)]]
    .filter(([, , matches]) => matches)
    .map(([list, ids, matches]) => ["left", "right"].map((name) => {
      const side = rows[name];
      return { fits: accepted(side, list, matches), ids: side[ids] };
    }));
  const found = new Uint32Array(rows.length);
  let length = 0;
  for (let row = 0; row < rows.length; row++) {
    if (!marks[rows.marks[row]]) continue;
    if (kernel && !rows.otherKernel(row)) continue;
    if (tests.length && !tests.every((sides) => fits(rows, row, sides))) continue;
    found[length++] = row;
  }
  return found.subarray(0, length);
}

function fits(rows, row, [left, right]) {
  const a = rows.op("left", row), b = rows.op("right", row);
  return (a >= 0 && left.fits[left.ids[a]] === 1) || (b >= 0 && right.fits[right.ids[b]] === 1);
}
