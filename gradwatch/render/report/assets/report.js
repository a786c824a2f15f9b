// Puts the page together: the map and its controls, the trends of a layer, the curves of the run.

const $ = (id) => document.getElementById(id);

const CURVES = [
  { name: "Loss", about: "training and validation", of: ["loss", "val_loss"] },
  { name: "Gradient norm", about: "over all layers, before and after clipping", of: ["grad_norm.before_clip", "grad_norm.after_clip"], log: true, equal: "over all layers; nothing was clipped" },
  { name: "Validation accuracy", about: "fraction predicted correctly", of: ["val_accuracy"], say: percent },
  { name: "Learning rate", about: "by optimizer group", of: /^lr\./ },
  { name: "Loss scale", about: "of the GradScaler; red ticks at the top are skipped updates", of: ["loss_scale"], log: true, skips: true },
];
const COSTS = [{ name: "Time", about: "of a step and of monitoring it, in milliseconds", of: ["step_ms", "watch_ms"], log: true }];
const COLOURS = ["--first", "--second", "--third", "--fourth"];

function floats(text) {
  return new Float32Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

/** Draw the curves of the run that a list names and that were recorded. */
function drawCurves(place, list, data) {
  const marks = [...new Map(data.findings.map((finding) => [finding.kind, finding])).values()];
  for (const wanted of list) {
    const curves = data.curves.filter(({ name }) => (wanted.of instanceof RegExp ? wanted.of.test(name) : wanted.of.includes(name)));
    const skipped = wanted.skips ? skips(data) : [];
    if (!curves.length || (wanted.skips && !skipped.length && isConstant(curves[0]))) continue;
    const merged = wanted.equal && curves.length > 1 && curves.every((curve) => `${curve.values}` === `${curves[0].values}`);
    const lines = (merged ? curves.slice(0, 1) : curves).map((curve, i) => ({ name: curve.name, colour: COLOURS[i % COLOURS.length], steps: curve.first, last: curve.last, ...spread(curve.values.map(floats)) }));
    lineChart(place, { ...wanted, about: merged ? wanted.equal : wanted.about, say: wanted.say ?? digits, lines, marks: [...marks, ...skipped], range: [0, Math.max(data.step, 1)] });
  }
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
  const marks = data.findings.filter((finding) => finding[of].includes(row)), absent = [];
  for (const statistic of data.statistics.filter((s) => s.of === of)) {
    const columns = data.columns[statistic.columns], { scale, width } = statistic;
    const value = (code) => (code === MISSING ? NaN : code >= INFINITE ? Infinity : code === ZERO ? 0 : Math.sign(code - ZERO) * (scale.log ? 10 ** levelOf(code, scale) : levelOf(code, scale)));
    const line = (codes) => Array.from(codes.subarray(row * width, (row + 1) * width), value);
    const all = columns.thinned ? { low: line(statistic.low), high: line(statistic.high) } : {};
    const mid = line(statistic.mid);
    if (mid.every(Number.isNaN)) { absent.push(statistic.name); continue; }
    const log = scale.log && [...mid, ...(all.low ?? [])].every((v) => !(v < 0)) && mid.some((v) => v > 0);
    const lines = [{ name: statistic.name, colour: "--first", steps: columns.first, last: columns.last, mid, ...all }];
    lineChart(place, { name: statistic.name, about: statistic.meaning, log, say: scale.log ? digits : percent, lines, marks, range: [0, Math.max(data.step, 1)] });
  }
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
  const signs = [item(SIGN.nan, "NaN"), item(SIGN.infinite, "Inf"), ...(statistic.scale.log ? [item(SIGN.zero, "exactly 0")] : []), item(SIGN.missing, "no value")];
  const ramp = element("span", {}, end(limits.low), swatch(160, (x) => Math.round((x / 159) * (LEVELS - 1))), end(limits.high));
  const rule = map.columns.thinned ? [element("span", {}, `cells are medians; ${statistic.scale.log ? "a step tenfold away, 0, NaN or Inf" : "a step a quarter away, NaN or Inf"} takes its cell over`)] : [];
  place.replaceChildren(ramp, ...signs, ...(map.marks.length ? [element("span", {}, "▲ finding")] : []), ...rule);
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
  for (const button of document.querySelectorAll("button.show[data-layer]")) {
    const finding = data.findings.find((f) => f.layer === button.dataset.layer && f.kind === button.dataset.kind);
    if (!finding || !names.includes(finding.statistic)) continue;
    button.hidden = false;
    button.addEventListener("click", () => {
      $("statistic").value = finding.statistic;
      refresh();
      const mark = map.marks.find((m) => m.layer === finding.layer && m.kind === finding.kind);
      if (mark) { map.goTo(mark); map.choose(); }
      $("map").focus();
    });
  }
  return () => { map.build(); map.mark(map.picked); drawLegend($("legend"), map); };
}

/** Draw everything again in other colours: for another theme, and for paper. */
function followTheme(redraw) {
  const again = () => { redraw(); for (const chart of charts) chart.redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("beforeprint", () => { document.documentElement.classList.add("paper"); for (const d of document.querySelectorAll("details")) d.open = true; again(); });
  addEventListener("afterprint", () => { document.documentElement.classList.remove("paper"); again(); });
}

/** Hide sections that have nothing to show, and their links. */
function leaveOut(...ids) {
  for (const id of ids) for (const part of [$(id), document.querySelector(`nav a[href="#${id}"]`)]) part.hidden = true;
}

async function main() {
  const data = JSON.parse($("data").textContent);
  useScale(data.scale);
  if (data.step < 0) return leaveOut("layers", "run");
  readStatistics(data, await inflate($("pack").textContent));
  drawCurves($("curves"), CURVES, data);
  drawCurves($("cost-curves"), COSTS, data);
  const redraw = data.statistics.length ? explore(data) : () => {};
  if (!data.statistics.length) leaveOut("layers");
  followTheme(redraw);
}

main().then(() => { document.documentElement.dataset.ready = "true"; });
