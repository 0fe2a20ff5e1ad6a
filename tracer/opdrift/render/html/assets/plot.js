// How the difference grows along the run: one point an op, logarithmic, with what the answer names marked.

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

/** Draw the plot; `go(row)` is called with the row of the point that is clicked. */
function drawPlot(rows, go) {
  const place = document.getElementById("plot");
  if (!place) return; // nothing differs, or by nothing that a logarithm shows
  const points = measured(rows);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label",
    `relative difference of ${points.rows.length} ops along the run, from ${sizeText(points.least)} to ${sizeText(points.largest)}; the table below tells the same`);
  let plot = null;
  const redraw = () => {
    plot?.destroy();
    plot = new uPlot(plotOptions(rows, points, place.clientWidth), [points.x, points.y, points.amplified].slice(0, facts.amplifiers.length ? 3 : 2), place);
    plot.over.addEventListener("click", (event) => {
      if (plot.select.width > 0) return; // that was a zoom
      const index = nearest(plot, points, event.offsetX, event.offsetY);
      if (index >= 0) go(points.rows[index]);
    });
  };
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(place.clientWidth - width) < 2) return;
    width = place.clientWidth;
    if (plot) plot.setSize({ width, height: plotHeight(width) }); else redraw();
  }).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("themechange", redraw);
}

function plotHeight(width) { return width < 600 ? 220 : 280; }

function measured(rows) {
  const amplifiers = new Map(facts.amplifiers.map((each) => [each.row, each]));
  const found = { rows: [], x: [], y: [], amplified: [], least: Infinity, largest: 0 };
  for (let row = 0; row < rows.length; row++) {
    const amplifier = amplifiers.get(row);
    const size = Number.isNaN(rows.sizes[row]) && amplifier ? amplifier.size : rows.sizes[row];
    const op = rows.op("left", row);
    if (!(size > 0) || !Number.isFinite(size) || op < 0) continue;
    found.rows.push(row);
    found.x.push(rows.left.seq(op));
    found.y.push(size);
    found.amplified.push(amplifier ? size : null);
    found.least = Math.min(found.least, size);
    found.largest = Math.max(found.largest, size);
  }
  return found;
}

function plotOptions(rows, points, width) {
  const ink = colour("--ink"), line = colour("--line");
  const low = 10 ** Math.floor(Math.log10(points.least) - 0.05);
  const high = 10 ** Math.ceil(Math.log10(points.largest) + 0.05);
  const last = rows.left.seqs[rows.left.seqs.length - 1];
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  return {
    width,
    height: plotHeight(width),
    scales: {
      x: { time: false, range: (_, from, to) => (from === to ? [from - 1, to + 1] : [from, to]), min: 1, max: Math.max(2, last) },
      y: { distr: 3, range: [low, high] },
    },
    axes: [
      { ...axis, label: "op of the left run", labelSize: 18, labelFont: "12px system-ui, sans-serif", size: 32, values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? countText(v) : "")) },
      { ...axis, size: 64, values: (_, ticks) => ticks.map((v) => (v === null || !isPowerOfTen(v) ? "" : powerText(v))) },
    ],
    legend: { show: true, live: true },
    cursor: { drag: { x: true, y: false, setScale: true } },
    series: [
      { label: "op", value: (_, v) => (v === null ? "" : countText(v)) },
      { label: "differs by", stroke: colour("--inherited"), paths: () => null, points: { show: true, size: points.rows.length < 200 ? 7 : 4, fill: colour("--inherited") },
        value: (_, v) => (v === null ? "" : sizeText(v)) },
      { label: "amplified", stroke: colour("--bad"), paths: () => null, points: { show: false },
        value: (_, v) => (v === null ? "" : sizeText(v)) },
    ].slice(0, facts.amplifiers.length ? 3 : 2),
    hooks: {
      draw: [(plot) => drawMarks(plot, rows, points)],
      // it says what is under the pointer, and without one nothing
      setLegend: [(plot) => { plot.root.querySelector(".u-legend").style.visibility = plot.cursor.idx == null ? "hidden" : ""; }],
    },
  };
}

function isPowerOfTen(value) { return Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6; }
function powerText(value) { return value === 1 ? "1" : `1e${Math.round(Math.log10(value))}`; }

/** Lines at the first divergences, with words beside them, and a triangle at each amplifier. */
function drawMarks(plot, rows, points) {
  const context = plot.ctx, ratio = devicePixelRatio, box = plot.bbox;
  context.save();
  context.beginPath();
  context.rect(box.left, box.top, box.width, box.height);
  context.clip();
  context.font = `${12 * ratio}px system-ui, sans-serif`;
  context.textBaseline = "top";
  facts.lines.forEach(({ row, says, material }, number) => {
    const op = rows.op("left", row);
    const x = plot.valToPos(rows.left.seq(op < 0 ? rows.ops.left[row] : op), "x", true);
    context.strokeStyle = context.fillStyle = material ? colour("--bad") : colour("--accent");
    context.setLineDash(material ? [] : [6 * ratio, 4 * ratio]);
    context.lineWidth = 2 * ratio;
    context.beginPath();
    context.moveTo(x, box.top);
    context.lineTo(x, box.top + box.height);
    context.stroke();
    const right = x > box.left + box.width * 0.6;
    context.textAlign = right ? "right" : "left";
    context.fillText(says, x + (right ? -6 : 6) * ratio, box.top + (4 + 16 * number) * ratio);
  });
  context.setLineDash([]);
  context.fillStyle = colour("--bad");
  const size = 6 * ratio;
  points.amplified.forEach((value, index) => {
    if (value === null) return;
    const x = plot.valToPos(points.x[index], "x", true), y = plot.valToPos(value, "y", true);
    context.beginPath();
    context.moveTo(x, y - size);
    context.lineTo(x - size, y + size);
    context.lineTo(x + size, y + size);
    context.fill();
  });
  context.restore();
}

/** The point that is nearest to a place in the plot, -1 if none is near. */
function nearest(plot, points, left, top) {
  let best = -1, least = 30 * 30;
  points.x.forEach((x, index) => {
    const dx = plot.valToPos(x, "x") - left, dy = plot.valToPos(points.y[index], "y") - top;
    if (dx * dx + dy * dy < least) { least = dx * dx + dy * dy; best = index; }
  });
  return best;
}
