// Puts the page together: the map and its controls, the trends of a layer, the curves of the run.

const $ = (id) => document.getElementById(id);

const CURVES = [
  { name: "Loss", title: "loss", of: ["loss", "val_loss"], log: spansDecades },
  { name: "Gradient norm", about: "over all layers", title: "L2 norm", of: ["grad_norm.before_clip", "grad_norm.after_clip"], log: () => true, skips: true, equal: "over all layers; nothing was clipped" },
  { name: "Learning rate", title: "learning rate", of: /^lr\./, log: spansDecades },
  { name: "Validation accuracy", about: "fraction predicted correctly", title: "accuracy", of: ["val_accuracy"], say: percent },
  { name: "Loss scale", about: "of the GradScaler", title: "scale", of: ["loss_scale"], log: () => true, skips: true, varies: true },
];
const COSTS = [{ name: "Time", about: "of a step, of its wait for data and of monitoring it", title: "ms", of: ["step_ms", "data_wait_ms", "watch_ms"], log: () => true }];
const NAMES = { loss: "training", val_loss: "validation", "grad_norm.before_clip": "before clipping", "grad_norm.after_clip": "after clipping", step_ms: "step", data_wait_ms: "wait for data", watch_ms: "monitoring" };
const COLOURS = ["--first", "--second", "--third", "--fourth"];
const REDUCTIONS = { l2: "L2 norm", absmax: "magnitude", mean: "mean", std: "deviation", zero_frac: "zeros", nonfinite: "elements", ratio: "update / weight", dead_frac: "dead units", saturated_frac: "saturated", max_logit: "largest logit", entropy: "entropy", silent: "units", silent_since: "step", units: "units" };

/** Return what a statistic of layers measures, for an axis. */
const titleOf = ({ name }) => REDUCTIONS[name.split(".").at(-1)] ?? name;

/** Return whether values above 0 are so far apart that a linear axis would flatten most of them. */
function spansDecades(lines) {
  const values = lines.flatMap((line) => Array.from(line.mid)).filter(Number.isFinite).sort((a, b) => a - b);
  return values[0] > 0 && values.at(-1) > 100 * values[values.length >> 1];
}

function floats(text) {
  return new Float32Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

/** Draw the curves of the run that a list names and that were recorded. Curves with equal values share a line. */
function drawCurves(place, list, data, flags) {
  const marks = firstOfKinds(data.findings);
  for (const wanted of list) {
    const curves = data.curves.filter(({ name }) => (wanted.of instanceof RegExp ? wanted.of.test(name) : wanted.of.includes(name)));
    const skipped = wanted.skips ? skips(data) : [];
    if (!curves.length || (wanted.varies && isConstant(curves[0]))) continue;
    const alike = Object.values(Object.groupBy(curves, (curve) => `${curve.first} ${curve.values}`));
    const lines = alike.map((equal, i) => ({ name: named(equal), colour: COLOURS[i % COLOURS.length], steps: equal[0].first, last: equal[0].last, ...spread(equal[0].values.map(floats)) }));
    const merged = wanted.equal && curves.length > alike.length, about = merged ? wanted.equal : wanted.about ?? (lines.length > 1 || curves.length < 2 ? "" : lines[0].name);
    lineChart(place, { ...wanted, about, log: wanted.log?.(lines), say: wanted.say ?? digits, lines, flags, marks: [...marks, ...skipped], range: [0, Math.max(data.step, 1)] });
  }
}

/** Return the name of curves with equal values, such as `groups 0, 1`. */
function named(equal) {
  const groups = equal.map(({ name }) => name.split(".")).filter(([of]) => of === "lr").map(([, group]) => group);
  return groups.length ? `parameter group${groups.length > 1 ? "s" : ""} ${stretches(groups.map(Number))}` : NAMES[equal[0].name] ?? equal[0].name;
}

/** Return growing numbers in words, such as `0, 1, 4 to 9`. */
function stretches(numbers) {
  const starts = numbers.filter((n, i) => n !== numbers[i - 1] + 1), ends = numbers.filter((n, i) => n + 1 !== numbers[i + 1]);
  return starts.map((from, i) => (from === ends[i] ? `${from}` : `${from}${ends[i] > from + 1 ? " to" : ","} ${ends[i]}`)).join(", ");
}

/** Return the earliest finding of each kind, in the order of their steps. */
function firstOfKinds(findings) {
  const sorted = [...findings].sort((a, b) => a.step - b.step);
  return sorted.filter((finding, i) => sorted.findIndex(({ kind }) => kind === finding.kind) === i);
}

/** List the findings that the charts mark, each with a link to its section. */
function listMarks(place, data) {
  place.replaceChildren(...firstOfKinds(data.findings).map((mark) => element("a", { href: `#${mark.kind}`, class: mark.severity }, `▼ ${mark.code} ${mark.kind}, step ${mark.step.toLocaleString("en")}`)));
}

const spread = ([mid, low, high]) => ({ mid, low, high });
const isConstant = (curve) => curve.values.map(floats).every((values) => values.every((value) => value === values[0]));

/** Return the columns in which an update was skipped, as marks. */
function skips(data) {
  const curve = data.curves.find(({ name }) => name === "skipped");
  if (!curve) return [];
  const most = floats(curve.values.at(-1));
  return curve.first.filter((_, i) => most[i] > 0).map((step) => ({ step, severity: "critical", tick: true }));
}

/** Draw every statistic of a row of a table. */
function drawTrends(place, data, of, row) {
  clear(place);
  const marks = data.findings.filter((finding) => finding[of].flat().includes(row) || finding.layer === null), absent = [], zero = [];
  for (const statistic of data.statistics.filter((s) => s.of === of)) {
    const columns = data.columns[statistic.columns], { scale, width } = statistic;
    const value = (code) => (code === MISSING ? NaN : code >= INFINITE ? Infinity : code === ZERO ? 0 : Math.sign(code - ZERO) * (scale.log ? 10 ** levelOf(code, scale) : levelOf(code, scale)));
    const line = (codes) => Array.from(codes.subarray(row * width, (row + 1) * width), value);
    const all = columns.thinned ? { low: line(statistic.low), high: line(statistic.high) } : {};
    const mid = line(statistic.mid);
    if (mid.every(Number.isNaN)) { absent.push(statistic.name); continue; }
    if ([...mid, ...(all.low ?? []), ...(all.high ?? [])].every((v) => v === 0 || Number.isNaN(v))) { zero.push(statistic.name); continue; }
    const log = scale.log && [...mid, ...(all.low ?? [])].every((v) => !(v < 0)) && mid.some((v) => v > 0);
    const lines = [{ name: statistic.name, colour: "--first", steps: columns.first, last: columns.last, mid, ...all }];
    lineChart(place, { name: statistic.name, about: statistic.meaning, title: titleOf(statistic), log, say: scale.log ? digits : percent, lines, marks, range: [0, Math.max(data.step, 1)] });
  }
  if (zero.length) place.append(element("p", { class: "meaning" }, `0 at every step: ${zero.join(", ")}.`));
  if (absent.length) place.append(element("p", { class: "meaning" }, `No value at any step: ${absent.join(", ")}.`));
}

/** Explain the colours of the map. */
function drawLegend(place, map) {
  const { statistic, limits } = map, colours = palette();
  const swatch = (width, kind) => {
    const canvas = element("canvas", { width, height: 12, "aria-hidden": "true" }), ctx = canvas.getContext("2d"), image = ctx.createImageData(width, 12), pixels = new Int32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i++) pixels[i] = pixel(colours, kind(i % width), i % width, Math.floor(i / width));
    ctx.putImageData(image, 0, 0);
    return canvas;
  };
  const end = (level) => (statistic.scale.log ? digits(Number((10 ** level).toPrecision(2))) : percent(level));
  const item = (kind, text) => element("span", {}, swatch(20, () => kind), text);
  const band = element("span", { class: "band", "aria-hidden": "true" });
  const gaps = map.gaps().length ? [element("span", {}, band, "loss NaN or Inf: the backward pass was skipped")] : [];
  const signs = [item(SIGN.nan, "NaN"), item(SIGN.infinite, "Inf"), ...(statistic.scale.log ? [item(SIGN.zero, "exactly 0")] : []), item(SIGN.missing, "no value")];
  const ramp = element("span", {}, element("b", {}, `${statistic.name}: ${titleOf(statistic)}${statistic.scale.log ? ", log scale" : ""}`), end(limits.low), swatch(160, (x) => Math.round((x / 159) * (LEVELS - 1))), end(limits.high));
  const rule = map.columns.thinned ? [element("span", {}, `cells are medians; ${statistic.scale.log ? "a step tenfold away, 0, NaN or Inf" : "a step a quarter away, NaN or Inf"} takes its cell over`)] : [];
  place.replaceChildren(ramp, ...signs, ...gaps, ...(map.marks.length ? [element("span", {}, "▲ finding in a layer")] : []), ...(map.runMarks.length ? [element("span", {}, "▼ finding on the whole run")] : []), ...rule);
}

/** Write the map as a table: every shown layer at some steps from first to last. */
function drawTable(place, map) {
  const { statistic: s, columns, order, names } = map, last = columns.first.length - 1;
  const shown = [...new Set(Array.from({ length: 9 }, (_, i) => Math.round((i / 8) * last)))];
  const head = element("tr", {}, element("th", { scope: "col" }, "layer"), ...shown.map((c) => element("th", { scope: "col" }, steps(columns.first[c], columns.last[c]))));
  const rows = order.map((row) => element("tr", {}, element("th", { scope: "row" }, names[row]), ...shown.map((c) => element("td", {}, say(s.mid[row * s.width + c], s)))));
  place.replaceChildren(element("table", {}, element("caption", { class: "unseen" }, `${s.name} of each layer at ${shown.length} of ${last + 1} columns of steps`), element("thead", {}, head), element("tbody", {}, ...rows)));
}

/** Let the page's controls drive the map and the trends. */
function explore(data) {
  const names = data.statistics.map((statistic) => statistic.name), main = data.rows.param.some((row) => !row.main);
  for (const name of names) $("statistic").append(element("option", { value: name }, name));
  $("statistic").value = names.includes("grad.l2") ? "grad.l2" : names[0];
  $("explorer").hidden = false;
  let of = "";
  const pick = (row) => {
    const entry = data.rows[map.statistic.of][row];
    $("layer-choice").value = row;
    $("layer-title").textContent = entry.name;
    $("layer-about").textContent = entry.about ?? "";
    drawTrends($("trends"), data, map.statistic.of, row);
    map.mark(row);
  };
  const map = new HeatMap($("map"), data, { tell: (text) => { $("readout").textContent = text; }, pick });
  const refresh = () => {
    const statistic = data.statistics.find(({ name }) => name === $("statistic").value);
    map.show(statistic, $("all-rows").checked);
    $("meaning").textContent = `${statistic.name}: ${statistic.meaning}.`;
    $("all-rows-label").hidden = !(statistic.of === "param" && main);
    drawLegend($("legend"), map);
    if ($("table").open) drawTable($("table").querySelector("div"), map);
    if (of === statistic.of) return map.mark(map.picked);
    of = statistic.of;
    $("layer-choice").replaceChildren(...data.rows[of].map((row, i) => element("option", { value: i }, row.name)));
    pick(map.marks.length ? map.order[map.marks[0].y] : map.order[0]);
  };
  refresh();
  $("statistic").addEventListener("change", refresh);
  $("all-rows").addEventListener("change", refresh);
  $("layer-choice").addEventListener("change", (event) => pick(Number(event.target.value)));
  $("table").addEventListener("toggle", () => $("table").open && drawTable($("table").querySelector("div"), map));
  $("zoom-in").addEventListener("click", () => map.zoom(0.5));
  $("zoom-out").addEventListener("click", () => map.zoom(2));
  $("zoom-reset").addEventListener("click", () => map.reset());
  for (const button of document.querySelectorAll("button.show")) {
    const finding = data.findings.find((f) => f.layer === (button.dataset.layer ?? null) && f.kind === button.dataset.kind);
    if (!finding || (finding.layer !== null && !names.includes(finding.statistic))) continue;
    button.hidden = false;
    button.addEventListener("click", () => {
      if (finding.statistic) $("statistic").value = finding.statistic;
      refresh();
      const mark = [...map.marks, ...map.runMarks].find((m) => m.layer === finding.layer && m.kind === finding.kind);
      if (mark) map.goTo(mark);
      if (mark && !mark.whole) map.choose();
      $("map").focus();
    });
  }
  return () => { map.build(); map.mark(map.picked); drawLegend($("legend"), map); };
}

/** Draw everything again in other colours: for another theme, and for paper. */
function followTheme(redraw) {
  const again = () => { redraw(); for (const chart of [...charts, ...profiles]) chart.redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("beforeprint", () => { document.documentElement.classList.add("paper"); for (const d of document.querySelectorAll("details")) d.open = true; again(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("paper"); again(); });
}

/** Let the buttons beside blocks of code copy them. */
function offerCopies() {
  for (const button of document.querySelectorAll("button.copy")) {
    const block = button.parentElement.querySelector("code");
    button.hidden = false;
    button.addEventListener("click", async () => {
      button.textContent = (await copied(block)) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
}

/** Copy the text of an element and return whether that worked; it is selected if not, to be copied by hand. */
async function copied(block) {
  try {
    await navigator.clipboard.writeText(block.textContent);
    return true;
  } catch { // a page from a file may lack the permission
    getSelection().selectAllChildren(block);
    return document.execCommand("copy");
  }
}

/** Hide sections that have nothing to show, and their links. */
function leaveOut(...ids) {
  for (const id of ids) for (const part of [$(id), document.querySelector(`nav a[href="#${id}"]`)]) part.hidden = true;
}

async function main() {
  const data = JSON.parse($("data").textContent);
  useScale(data.scale);
  offerCopies();
  if (data.step < 0) return leaveOut("layers", "run", "checks", "cost");
  readStatistics(data, await inflate($("pack").textContent));
  drawCurves($("curves"), CURVES, data, true);
  listMarks($("marks"), data);
  drawCurves($("cost-curves"), COSTS, data, false);
  for (const figure of document.querySelectorAll("figure.profile")) drawProfile(figure);
  const redraw = data.statistics.length ? explore(data) : () => {};
  if (!data.statistics.length) leaveOut("layers");
  followTheme(redraw);
}

main().then(() => { document.documentElement.dataset.ready = "true"; });
