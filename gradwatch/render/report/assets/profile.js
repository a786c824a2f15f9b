// Profiles over depth: a statistic of every layer, input side first, at the onset of a finding and at the end of the run.

const profiles = new Set();
const MOMENTS = ["--second", "--first"];

/** Draw the profile of a figure above its caption. */
function drawProfile(figure) {
  const data = JSON.parse(figure.dataset.profile), { layers, lines, usual, log } = data;
  const keys = element("p", { class: "legend", "aria-hidden": "true" }), body = element("div", { class: "chart", role: "img", "aria-label": figure.textContent });
  figure.prepend(keys, body);
  const height = 240, names = shortened(layers, 18), say = log ? digits : percent;
  const drawn = (value) => (value === null || (log && value <= 0) ? null : log ? Math.log10(value) : value);
  const series = [{}], bands = [], columns = [[...layers.keys()]];
  if (usual) {
    series.push({ points: { show: false } }, { points: { show: false } });
    columns.push(usual.high.map(drawn), usual.low.map(drawn));
    bands.push({ series: [1, 2], fill: () => `color-mix(in srgb, ${css("--ok")} 24%, transparent)` });
  }
  for (const [i, line] of lines.entries()) {
    series.push({ stroke: () => css(colourOf(i, lines)), width: 2, dash: i === lines.length - 1 ? [] : [6, 4], points: { show: layers.length < 80, size: 5 } });
    columns.push(line.values.map(drawn));
  }
  const letters = Math.max(...names.map((name) => name.length));
  const chart = new uPlot({
    width: body.clientWidth || 320, height, series, bands, legend: { show: false }, padding: [10, 12, 0, null],
    scales: { x: { time: false, range: [-0.4, layers.length - 0.6] }, y: { range: (_, low, high) => (log ? deep(low, high) : [0, 1]) } },
    axes: [
      axis({ size: 24, ...titled("layer, input side first"), grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], space: letters * 6.4 + 14, values: (_, at) => at.map((m) => (Number.isInteger(m) ? names[m] ?? "" : "")) }),
      axis({ size: 56, ...titled(log ? `${data.label}, log scale` : data.label), ...(log ? { splits: (_u, _i, low, high) => logTicks(low, high) } : {}), values: (_, at) => tickLabels(at.map((level) => (log ? 10 ** level : level)), say, log) }),
    ],
    cursor: { y: false, drag: { x: false, y: false } },
    hooks: { draw: [(u) => drawSigns(u, data)], setCursor: [(u) => hoverLayer(u, data, say)] },
  }, columns, body);
  profiles.add(chart);
  watchWidth(chart, body, height);
  keys.replaceChildren(...profileKeys(data));
}

const colourOf = (i, lines) => MOMENTS[i + MOMENTS.length - lines.length];

/** Return a range of powers of ten with room below for what is exactly 0, and above for NaN and Inf. */
function deep(low, high) {
  if (low === null) return [-1, 0];
  const room = Math.max(0.12 * (high - low), 0.3);
  return [low - room, high + room];
}

/** Explain the lines and signs of a profile. */
function profileKeys({ lines, usual, median, affected, log }) {
  const sign = (text, colour, name) => {
    const mark = element("span", { class: "sign", "aria-hidden": "true" }, text);
    mark.style.color = `var(${colour})`;
    return element("span", {}, mark, name);
  };
  const made = lines.map((line, i) => key({ name: line.name, colour: colourOf(i, lines) }, lines.length - 1 - i));
  if (usual) made.push(sign("\u25ac", "--ok", usual.name));
  if (median !== undefined) made.push(sign("\u254c", "--muted", "median layer"));
  if (affected.length) made.push(sign("\u25cb", "--critical", "named by the finding"));
  if (log && lines.some((line) => line.values.includes(0))) made.push(sign("\u25a0", "--critical", "exactly 0"));
  if (lines.some((line) => line.broken.length)) made.push(sign("\u2715", "--critical", "NaN or Inf"));
  return made;
}

/** Draw what a line cannot show: zeros on the floor, NaN and Inf at the top, the median, and rings about named layers. */
function drawSigns(u, { lines, median, affected, log }) {
  const { left, top, width, height } = u.bbox, ctx = u.ctx, dpr = devicePixelRatio, x = (m) => u.valToPos(m, "x", true);
  ctx.save();
  ctx.strokeStyle = css("--muted"); ctx.lineWidth = dpr; ctx.setLineDash([3 * dpr, 4 * dpr]);
  if (median !== undefined) {
    const y = u.valToPos(Math.log10(median), "y", true);
    ctx.beginPath(); ctx.moveTo(left, y); ctx.lineTo(left + width, y); ctx.stroke();
  }
  ctx.setLineDash([]); ctx.fillStyle = ctx.strokeStyle = css("--critical"); ctx.lineWidth = 1.5 * dpr;
  const floor = top + height - 7 * dpr, size = 3.5 * dpr;
  for (const { values, broken } of lines) {
    values.forEach((value, m) => log && value === 0 && ctx.fillRect(x(m) - size, floor - size, 2 * size, 2 * size));
    for (const m of broken) for (const slope of [-1, 1]) {
      ctx.beginPath(); ctx.moveTo(x(m) - size, top + 7 * dpr - slope * size); ctx.lineTo(x(m) + size, top + 7 * dpr + slope * size); ctx.stroke();
    }
  }
  const last = lines.at(-1).values;
  for (const m of affected) if (last[m] !== null) {
    const y = log && last[m] === 0 ? floor : u.valToPos(log ? Math.log10(last[m]) : last[m], "y", true);
    ctx.beginPath(); ctx.arc(x(m), y, 5.5 * dpr, 0, 2 * Math.PI); ctx.stroke();
  }
  ctx.restore();
}

/** Say the values of the layer under the mouse. */
function hoverLayer(u, { layers, lines, usual }, say) {
  const m = Math.round(u.posToVal(u.cursor.left, "x"));
  if (u.cursor.left < 0 || !u.over.matches(":hover") || !(m in layers)) return note(u);
  const told = ({ values, broken }) => (broken.includes(m) ? "NaN or Inf" : values[m] === null ? "no value" : say(values[m]));
  const range = usual && usual.low[m] !== null ? [element("div", {}, `${usual.name}: ${say(usual.low[m])} to ${say(usual.high[m])}`)] : [];
  note(u, u.cursor.left, u.cursor.top, element("b", {}, layers[m]), ...lines.map((line) => element("div", {}, `${line.name}: ${told(line)}`)), ...range);
}
