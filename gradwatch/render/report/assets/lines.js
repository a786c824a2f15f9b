// Line charts over the steps, drawn by uPlot: a line of medians, a band from least to greatest, ticks where it broke.

const FLAG = 24; // room for the codes of findings over a chart
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]]; // of equal lines, each stays visible through the next
const charts = new Set(); // all that share the cursor and the range of steps

/** Return the options of an axis in the colours of the theme. */
const axis = (more) => ({ stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), size: 4, width: 1 }, font: "11px system-ui, sans-serif", ...more });
const titled = (label) => ({ label, labelSize: 16, labelGap: 0, labelFont: "11px system-ui, sans-serif" });
/** Return the axis of the steps; labels beyond a share of its width are left out, where there is no room for them. */
const stepsAxis = (share = 1) => axis({ size: 24, ...titled("step"), values: (u, splits) => {
  const { min, max } = u.scales.x;
  return splits.map((step) => (Number.isInteger(step) && step <= min + share * (max - min) ? step.toLocaleString("en") : ""));
} });

/** Show a range of steps in all charts. */
function showSteps(min, max) {
  for (const chart of charts) chart.setScale("x", { min, max });
}

/** Keep a chart as wide as its place, which may change. */
function watchWidth(chart, place, height) {
  new ResizeObserver(() => { if (place.clientWidth && place.clientWidth !== chart.width) chart.setSize({ width: place.clientWidth, height }); }).observe(place);
}

/** Take down the charts of a place. */
function clear(place) {
  for (const chart of [...charts]) if (place.contains(chart.root)) { charts.delete(chart); chart.destroy(); }
  place.replaceChildren();
}

/** Return an element with attributes and children; text is never read as markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Show a note beside the cursor of a chart, within its edges. */
function note(chart, left, top, ...lines) {
  let box = chart.over.querySelector(".tooltip");
  if (!lines.length) return box?.remove();
  if (!box) chart.over.append((box = element("div", { class: "tooltip", "aria-hidden": "true" })));
  box.replaceChildren(...lines);
  const [width, height] = [chart.over.clientWidth, chart.over.clientHeight];
  box.style.left = `${Math.min(Math.max(left + (left > width / 2 ? -box.offsetWidth - 12 : 12), -40), width - box.offsetWidth + 8)}px`;
  box.style.top = `${Math.min(top + 12, height - box.offsetHeight / 2)}px`;
}

/**
 * Draw one chart into a place.
 *
 * name, about: its caption; title: what its height is; log: powers of ten on the axis; say: a value in words;
 * lines: {name, colour, steps, mid, low, high} with values as they are (NaN is not shown, Infinity is broken);
 * marks: findings, as dashed lines at their steps, and what is only a `tick` at the top; range: first and last step of the run;
 * flags: whether the findings have their codes over the chart.
 */
function lineChart(place, { name, about, title, log, say, lines, marks, range, flags }) {
  const height = flags ? 215 : 185, figure = element("figure"), body = element("div", { class: "chart" });
  const keys = lines.length > 1 ? lines.map(key) : [];
  figure.append(element("figcaption", {}, element("b", {}, name), ` ${about}${log && lines.some((line) => Array.from(line.mid).includes(0)) ? "; zeros are on the floor" : ""}`, ...keys), body);
  figure.setAttribute("role", "group");
  body.setAttribute("role", "img");
  body.setAttribute("aria-label", `${name}: ${lines.map((line) => inWords(line, say, lines.length > 1)).join("; ")}`);
  place.append(figure);
  const drawn = (value) => (!Number.isFinite(value) || (log && value <= 0) ? null : log ? Math.log10(value) : value);
  const tables = lines.map((line) => [line.steps, ...[line.mid, line.low, line.high].filter(Boolean).map((values) => Array.from(values, drawn))]);
  const data = uPlot.join(tables);
  const series = [{}], bands = [];
  for (const [i, line] of lines.entries()) {
    series.push({ stroke: () => css(line.colour), width: i ? 2 : 1.5, dash: DASHES[i % DASHES.length], points: { show: line.steps.length < 60, size: 4 } });
    if (!line.low) continue;
    series.push({ points: { show: false } }, { points: { show: false } });
    bands.push({ series: [series.length - 1, series.length - 2], fill: () => `color-mix(in srgb, ${css(line.colour)} 22%, transparent)` });
  }
  const [min, max] = range;
  const chart = new uPlot({
    width: place.clientWidth ? body.clientWidth : 320, height, series, bands,
    padding: [flags ? FLAG : null, null, 0, null],
    legend: { show: false },
    scales: { x: { time: false, range: (_, a, b) => [a ?? min, b ?? max] }, y: { range: (_, low, high) => roomy(low, high, log) } },
    axes: [stepsAxis(), axis({ size: 52, ...titled(log ? `${title}, log scale` : title), ...(log ? { splits: (_u, _i, low, high) => logTicks(low, high) } : {}), values: (_, at) => tickLabels(at.map((level) => (log ? 10 ** level : level)), say, log) })],
    cursor: { y: false, drag: { x: true, y: false, setScale: false }, sync: { key: "steps", scales: ["x", null], setSeries: false }, bind: { dblclick: () => () => showSteps(min, max) } },
    hooks: {
      draw: [(u) => drawMarks(u, marks, lines, log), (u) => flags && drawFlags(u, marks)],
      setSelect: [(u) => { if (u.select.width > 4) showSteps(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")); u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false); }],
      setCursor: [(u) => hover(u, lines, say)],
    },
  }, data, body);
  chart.setScale("x", { min, max });
  charts.add(chart);
  watchWidth(chart, body, height);
}

/** Return a range with some air, not so narrow that noise looks like a trend, and not below 0 where no value is. */
function roomy(low, high, log) {
  if (low === null || high === null) return log ? [-1, 0] : [0, 1];
  const least = log ? 0.5 : 0.1 * Math.max(Math.abs(low), Math.abs(high)) || 1;
  const middle = (low + high) / 2, half = Math.max((high - low) * 1.08, least) / 2;
  return [log || low < 0 ? middle - half : Math.max(middle - half, 0), middle + half];
}

/** Return where an axis of powers of ten has ticks: at whole ones, between them where it is short, at round numbers where it is
 *  shorter still. */
function logTicks(min, max) {
  const span = max - min, every = Math.max(1, Math.ceil(span / 6));
  if (span < 1) return evenly(10 ** min, 10 ** max).map(Math.log10);
  const between = span > 2.5 ? [1] : [1, 3], ticks = [];
  for (let power = Math.floor(min); power <= max; power++) if (power % every === 0) ticks.push(...between.map((times) => power + Math.log10(times)));
  return ticks.filter((tick) => tick >= min && tick <= max);
}

/** Return up to five round numbers in a range. */
function evenly(low, high) {
  const unit = 10 ** Math.floor(Math.log10((high - low) / 3)), every = [1, 2, 5, 10].find((times) => (high - low) / (times * unit) <= 5) * unit;
  return Array.from({ length: 6 }, (_, i) => (Math.ceil(low / every) + i) * every).filter((value) => value <= high);
}

/** Return the numbers of an axis in one format, without needless digits: all with an exponent if one of them needs it, and on a
 *  linear axis with the same one. */
function tickLabels(values, say, log) {
  if (say === percent) return values.map(percent);
  const sizes = values.map(Math.abs).filter((size) => size > 0), power = (size) => Math.floor(Math.log10(size) + 1e-9);
  if (sizes.every((size) => size < 1e5 && size >= 1e-3)) return values.map((value) => value.toLocaleString("en", { maximumSignificantDigits: 4 }));
  const shared = power(Math.max(...sizes));
  return values.map((value) => {
    const exponent = log ? power(value) : shared;
    return value ? `${Number((value / 10 ** exponent).toPrecision(4))}e${exponent}` : "0";
  });
}

/** Draw the codes of findings over a chart, each where it has room, with a triangle at its step. */
function drawFlags(u, marks) {
  const { left, top, width } = u.bbox, ctx = u.ctx, dpr = devicePixelRatio;
  let free = -Infinity;
  ctx.save();
  ctx.font = `600 ${10.5 * dpr}px system-ui, sans-serif`; ctx.textBaseline = "bottom"; ctx.textAlign = "left";
  for (const mark of marks) {
    const x = u.valToPos(mark.step, "x", true);
    if (mark.tick || x < left || x > left + width) continue;
    ctx.fillStyle = css(`--${mark.severity}`);
    ctx.beginPath(); ctx.moveTo(x, top + 2 * dpr); ctx.lineTo(x - 5 * dpr, top - 6 * dpr); ctx.lineTo(x + 5 * dpr, top - 6 * dpr); ctx.fill();
    const room = ctx.measureText(mark.code).width, start = Math.min(Math.max(x - room / 2, 0), left + width - room);
    if (start < free) continue;
    ctx.fillText(mark.code, start, top - 7 * dpr);
    free = start + room + 6 * dpr;
  }
  ctx.restore();
}

/** Return a line's colour and name for the caption. */
function key(line, i = 0) {
  const sample = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  sample.setAttribute("viewBox", "0 0 12 6");
  sample.setAttribute("aria-hidden", "true");
  const stroke = document.createElementNS(sample.namespaceURI, "path");
  stroke.setAttribute("d", "M0 3H12");
  stroke.setAttribute("stroke-width", "2");
  if (i) stroke.setAttribute("stroke-dasharray", "4 2");
  stroke.style.stroke = `var(${line.colour})`;
  sample.append(stroke);
  return element("span", { class: "key" }, sample, ` ${line.name}`);
}

/** Return what a line does, for those who do not see it. */
function inWords(line, say, named) {
  const known = Array.from(line.mid).filter(Number.isFinite);
  const broken = Array.from(line.high ?? line.mid).filter((value) => value === Infinity).length;
  const told = known.length ? `from ${say(known[0])} to ${say(known.at(-1))}, lowest ${say(Math.min(...known))}, highest ${say(Math.max(...known))}` : "no finite value";
  return `${named ? `${line.name} ` : ""}${told}${broken ? `, NaN or Inf in ${broken} columns` : ""}`;
}

/** Draw findings as dashed lines, broken values as ticks on the floor, and on a log scale zeros as a line there. */
function drawMarks(u, marks, lines, log) {
  const { left, top, width, height } = u.bbox, ctx = u.ctx, dpr = devicePixelRatio;
  ctx.save();
  ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
  for (const mark of marks) {
    const x = u.valToPos(mark.step, "x", true);
    ctx.strokeStyle = css(`--${mark.severity}`); ctx.lineWidth = dpr; ctx.setLineDash(mark.tick ? [] : [4 * dpr, 3 * dpr]);
    ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + (mark.tick ? 8 * dpr : height)); ctx.stroke();
  }
  for (const line of log ? lines : []) {
    ctx.fillStyle = css(line.colour);
    line.mid.forEach((value, i) => {
      if (value !== 0) return;
      const x = u.valToPos(line.steps[i], "x", true), end = u.valToPos((line.last ?? line.steps)[i] + 1, "x", true);
      ctx.fillRect(x, top + height - 3 * dpr, Math.max(end - x, 2 * dpr), 3 * dpr);
    });
  }
  ctx.setLineDash([]); ctx.strokeStyle = css("--critical"); ctx.lineWidth = Math.max(2, dpr);
  ctx.beginPath();
  for (const line of lines) (line.high ?? line.mid).forEach((value, i) => {
    if (value !== Infinity) return;
    const x = u.valToPos(line.steps[i], "x", true);
    ctx.moveTo(x, top + height); ctx.lineTo(x, top + height - 10 * dpr);
  });
  ctx.stroke(); ctx.restore();
}

/** Say the values under the mouse. */
function hover(u, lines, say) {
  if (u.cursor.left < 0 || !u.over.matches(":hover")) return note(u);
  const step = u.posToVal(u.cursor.left, "x"), said = [];
  for (const line of lines) {
    const i = nearest(line.steps, step), at = (values) => say(values[i]);
    if (!said.length) said.push(element("b", {}, line.last ? steps(line.steps[i], line.last[i]) : steps(line.steps[i], line.steps[i])));
    const spread = line.low && line.low[i] !== line.high[i] ? ` (${at(line.low)} to ${at(line.high)})` : "";
    said.push(element("div", {}, `${lines.length > 1 ? `${line.name} ` : ""}${at(line.mid)}${spread}`));
  }
  note(u, u.cursor.left, u.cursor.top, ...said);
}

/** Return the index of the value of a growing array that is nearest. */
function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
}
