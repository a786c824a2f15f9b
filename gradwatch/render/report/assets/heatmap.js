// The map of layers by steps: colours of the cells, the view, the cursor of mouse and keyboard. uPlot draws the axes.

const AROUND = 54; // height of what is around the cells: marks above, the axis below
const NEAR = { log: 1, fraction: 0.25 }; // how far from the median a step takes its cell over: tenfold, or a quarter

class HeatMap {
  /** place: where to draw; data: what `readStatistics` gave; tell: called with the words of a cell; pick: with a row. */
  constructor(place, data, { tell, pick }) {
    Object.assign(this, { place, data, tell, pick, cell: null, picked: 0, chart: null });
    place.addEventListener("keydown", (event) => this.onKey(event));
    place.addEventListener("focus", () => this.moveTo(this.cell ?? { y: 0, column: 0 }));
  }

  /** Show a statistic, with all rows of its table or the main ones. */
  show(statistic, all) {
    this.statistic = statistic;
    this.columns = this.data.columns[statistic.columns];
    const rows = this.data.rows[statistic.of];
    this.order = [...rows.keys()].filter((row) => all || rows[row].main !== false);
    this.names = rows.map((row) => row.name);
    this.edges = [...this.columns.first, this.columns.last.at(-1) + 1];
    this.marks = this.data.findings.flatMap((finding) => this.places(finding).map((y, i) => ({ ...finding, y, isFirst: i === 0 })));
    this.runMarks = this.data.findings.filter((finding) => !finding.param.length && !finding.act.length).map((finding) => ({ ...finding, y: 0, isFirst: true, whole: true }));
    this.limits = colourLimits(statistic, this.order);
    this.cell = null;
    this.place.setAttribute("aria-label", `${statistic.name} of ${this.order.length} layers over the steps`);
    this.build();
  }

  /** Return in which shown rows a finding lies, one for each of its layers: of a module the first one, of a hidden tensor its
   *  module's. */
  places(finding) {
    const found = finding[this.statistic.of].map((rows) => {
      const y = rows.map((row) => this.order.indexOf(row)).find((at) => at >= 0), stem = this.names[rows[0]].replace(/[^.]*$/, "");
      return y ?? (stem ? this.order.findIndex((row) => this.names[row].startsWith(stem)) : -1);
    });
    return [...new Set(found)].filter((y) => y >= 0);
  }

  build() {
    const range = this.chart && [this.chart.scales.x.min, this.chart.scales.x.max];
    clear(this.place);
    const rows = Math.max(this.order.length, 1), width = this.place.clientWidth;
    this.height = Math.min(Math.max(rows * 20, 140), 560) + AROUND;
    const most = width < 600 ? 15 : 36;
    this.short = shortened(this.order.map((row) => this.names[row]), most);
    this.letters = Math.max(...this.short.map((name) => name.length), 4);
    this.chart = new uPlot({
      width, height: this.height, padding: [14, 0, 0, null], legend: { show: false },
      series: [{}, { paths: () => null, points: { show: false } }],
      scales: { x: { time: false, range: (_, min, max) => [min, max] }, y: { dir: -1, auto: false, range: (_, min, max) => [min, max] } },
      axes: [{ ...stepsAxis(0.985), grid: { show: false } }, axis({ size: this.letters * 6.7 + 12, grid: { show: false }, ticks: { show: false }, font: `11px ${css("--mono")}`, gap: 6, splits: (_u, _i, min, max) => this.labels(min, max), values: (_, at) => at.map((y) => this.short[Math.floor(y)] ?? "") })],
      cursor: { drag: { x: true, y: true, uni: 24, setScale: false }, points: { show: false }, sync: { key: "steps", scales: ["x", null], setSeries: false }, bind: { dblclick: () => () => this.reset() } },
      hooks: { drawClear: [(u) => this.paint(u)], draw: [(u) => this.paintMarks(u)], setCursor: [(u) => this.onHover(u)], setSelect: [(u) => this.onSelect(u)] },
    }, [[0, 1], [null, null]], this.place);
    const [first, last] = range ?? this.ends();
    this.chart.setScale("x", { min: first, max: last });
    this.chart.setScale("y", { min: 0, max: rows });
    this.chart.over.addEventListener("click", () => this.onClick());
    charts.add(this.chart);
    watchWidth(this.chart, this.place, this.height);
  }

  ends() { return [this.edges[0], this.edges.at(-1)]; }
  reset() { showSteps(...this.ends()); this.chart.setScale("y", { min: 0, max: Math.max(this.order.length, 1) }); }

  /** Show a part of the steps: `factor` below 1 goes nearer, about the cursor or the middle. */
  zoom(factor) {
    const { min, max } = this.chart.scales.x, [first, last] = this.ends();
    const middle = this.cell ? this.edges[this.cell.column] : (min + max) / 2, half = Math.max(((max - min) * factor) / 2, 1);
    showSteps(Math.max(first, middle - half), Math.min(last, middle + half));
  }

  /** Return the rows that get a name, as many as fit. */
  labels(min, max) {
    const every = Math.max(1, Math.ceil((14 * (max - min)) / (this.height - AROUND)));
    return Array.from({ length: Math.floor((max - min) / every) }, (_, i) => Math.floor(min) + i * every + 0.5);
  }

  /** Return what a cell of some columns is, a level of the ramp or a sign, and whether it is loud: NaN, Inf, or one step far
   *  from the median, which then stands for all. */
  cellOf(row, from, to) {
    const { statistic: s, limits } = this, start = row * s.width;
    const middle = s.mid[start + ((from + to - 1) >> 1)], far = (s.scale.log ? NEAR.log : NEAR.fraction) / s.scale.step;
    let least = Infinity, most = -1, infinite = false;
    for (let i = start + from; i < start + to; i++) {
      if (s.high[i] === NAN) return [SIGN.nan, true];
      infinite ||= s.high[i] === INFINITE;
      for (const code of [s.low[i], s.high[i]]) if (isNumber(code)) {
        const size = Math.abs(code - ZERO);
        if (size < least) least = size;
        if (size > most) most = size;
      }
    }
    if (infinite) return [SIGN.infinite, true];
    if (most < 0) return [SIGN.missing, false];
    const usual = isNumber(middle) ? Math.abs(middle - ZERO) : least;
    const size = most - usual > far && most - usual >= usual - least ? most : usual - least > far || (s.scale.log && least === 0 && most > 0) ? least : usual;
    const loud = size !== usual;
    if (size === 0 && s.scale.log) return [SIGN.zero, loud];
    const level = size === 0 ? 0 : s.scale.low + (size - 1) * s.scale.step;
    return [Math.round(Math.min(Math.max((level - limits.low) / (limits.high - limits.low), 0), 1) * (LEVELS - 1)), loud];
  }

  /** Return for every pixel across which columns it shows: those that begin in it, else the one before. */
  spans(u, width) {
    const { min, max } = u.scales.x, spans = [];
    let next = this.edges.findIndex((edge) => edge > min);
    next = next < 0 ? this.edges.length : next;
    for (let x = 0; x < width; x++) {
      const end = min + ((x + 1) / width) * (max - min), from = next;
      while (next < this.edges.length - 1 && this.edges[next] < end) next++;
      spans.push(next > from ? [from, next] : [Math.max(from - 1, 0), Math.max(from, 1)]);
    }
    return spans;
  }

  paint(u) {
    const { left, top, width, height } = Object.fromEntries(Object.entries(u.bbox).map(([k, v]) => [k, Math.round(v)]));
    if (!width || !height || !this.order.length) return;
    const image = u.ctx.createImageData(width, height), pixels = new Int32Array(image.data.buffer);
    const colours = palette(), spans = this.spans(u, width), { min, max } = u.scales.y, ready = new Map();
    const kinds = (y) => {
      if (!ready.has(y)) ready.set(y, this.kindsOf(this.order[y], spans));
      return ready.get(y);
    };
    const crowded = max - min > height; // several rows in each line of pixels: none may be passed over
    for (let y = 0; y < height; y++) {
      const from = Math.floor(min + (y / height) * (max - min)), to = Math.max(Math.ceil(min + ((y + 1) / height) * (max - min)) - 1, from);
      let line = kinds(Math.min(from, this.order.length - 1));
      for (let row = from + 1; crowded && row <= Math.min(to, this.order.length - 1); row++) line = line.map((kind, x) => graver(kind, kinds(row)[x]));
      for (let x = 0; x < width; x++) pixels[y * width + x] = pixel(colours, line[x], x, y);
    }
    u.ctx.putImageData(image, left, top);
  }

  kindsOf(row, spans) {
    let before = null, cell = null;
    const cells = spans.map((span) => {
      if (!before || span[0] !== before[0] || span[1] !== before[1]) cell = this.cellOf(row, ...span);
      before = span;
      return cell;
    });
    const kinds = cells.map(([kind]) => kind), margin = Math.ceil(1.5 * devicePixelRatio);
    cells.forEach(([kind, loud], x) => { // a single step of a long run would be a hair's breadth
      if (loud) kinds.fill(kind, Math.max(x - margin, 0), x + margin + 1);
    });
    return kinds;
  }

  /** Draw findings as triangles, a frame about the picked layer, and one about the cell of the keyboard. */
  paintMarks(u) {
    const { left, top, width, height } = u.bbox, ctx = u.ctx, dpr = devicePixelRatio;
    const x = (step) => u.valToPos(step, "x", true), y = (at) => u.valToPos(at, "y", true);
    ctx.save();
    ctx.beginPath(); ctx.rect(left - 7 * dpr, top - 14 * dpr, width + 14 * dpr, height + 28 * dpr); ctx.clip();
    this.paintWholeRun(u);
    const row = this.order.indexOf(this.picked);
    if (row >= 0) frame(ctx, left, y(row), width, y(row + 1) - y(row), 1.5 * dpr);
    if (this.cell && document.activeElement === this.place) {
      const [a, b] = [x(this.edges[this.cell.column]), x(this.edges[this.cell.column + 1])], room = Math.max(b - a, 5 * dpr);
      frame(ctx, a, y(this.cell.y), room, y(this.cell.y + 1) - y(this.cell.y), 2.5 * dpr);
    }
    const below = Math.min((y(1) - y(0)) / 2, 3 * dpr); // the tip points at the cell, and leaves it to be seen
    for (const mark of [...this.marks].reverse()) {
      if (mark.y < u.scales.y.min || mark.y >= u.scales.y.max) continue;
      triangle(ctx, x(mark.step + 0.5), y(mark.y + 0.5) + below, (mark.isFirst ? 9 : 6) * dpr, css(`--${mark.severity}`));
    }
    ctx.restore();
  }

  /** Draw what concerns no single layer: steps without a backward pass as bands, findings on the whole run as lines. */
  paintWholeRun(u) {
    const { left, top, width, height } = u.bbox, ctx = u.ctx, dpr = devicePixelRatio, x = (step) => u.valToPos(step, "x", true);
    for (const [first, last] of this.gaps()) {
      const from = Math.max(x(first), left), room = Math.min(Math.max(x(last + 1) - from, 2 * dpr), left + width - from);
      if (room <= 0) continue;
      ctx.fillStyle = NAN_COLOUR; ctx.globalAlpha = 0.4; ctx.fillRect(from, top, room, height);
      ctx.globalAlpha = 1; ctx.fillRect(from, top, room, 4 * dpr); ctx.fillRect(from, top + height - 4 * dpr, room, 4 * dpr);
    }
    for (const mark of this.runMarks) {
      const at = x(mark.step + 0.5);
      if (at < left || at > left + width) continue;
      ctx.strokeStyle = css(`--${mark.severity}`); ctx.lineWidth = 1.5 * dpr; ctx.setLineDash([4 * dpr, 3 * dpr]);
      ctx.beginPath(); ctx.moveTo(at, top); ctx.lineTo(at, top + height); ctx.stroke(); ctx.setLineDash([]);
      triangle(ctx, at, top + dpr, -11 * dpr, css(`--${mark.severity}`));
    }
  }

  /** Return the stretches of steps without a backward pass, where the map is of gradients. */
  gaps() { return this.statistic.name.startsWith("grad.") ? this.data.gaps : []; }

  /** Return the cell under a point of the chart, or null. */
  at(left, top) {
    if (left < 0 || top < 0) return null;
    const step = this.chart.posToVal(left, "x"), y = Math.floor(this.chart.posToVal(top, "y"));
    const after = this.columns.first.findIndex((first) => first > step);
    return y >= 0 && y < this.order.length ? { y, column: (after < 0 ? this.columns.first.length : Math.max(after, 1)) - 1 } : null;
  }

  /** Return what is in a cell: layer, steps, value, and the findings there. */
  words({ y, column }) {
    const s = this.statistic, row = this.order[y], i = row * s.width + column;
    const [low, mid, high] = [s.low[i], s.mid[i], s.high[i]].map((code) => say(code, s));
    const range = [this.columns.first[column], this.columns.last[column]];
    const next = this.columns.first[column + 1] ?? Infinity;
    const skipped = this.gaps().some(([first, last]) => first <= range[1] && last >= range[0]);
    const found = [...this.runMarks, ...this.marks].filter((mark) => (mark.whole || mark.y === y) && mark.step >= range[0] && mark.step < Math.max(next, range[1] + 1));
    return {
      layer: this.names[row], steps: steps(...range),
      value: `${s.name} ${mid}${low !== high ? ` (${low} to ${high})` : ""}${skipped ? "; the loss was NaN or Inf: the backward pass was skipped" : ""}`,
      findings: found.map((mark) => `${mark.severity}: ${mark.code} ${mark.kind}`),
    };
  }

  onHover(u) {
    const cell = u.over.matches(":hover") ? this.at(u.cursor.left, u.cursor.top) : null;
    if (!cell) return note(u);
    const { layer, steps, value, findings } = this.words(cell);
    note(u, u.cursor.left, u.cursor.top, element("b", {}, layer), element("div", {}, steps), element("div", {}, value), ...findings.map((text) => element("span", { class: "alarm" }, text)));
  }

  onClick() {
    const cell = this.at(this.chart.cursor.left, this.chart.cursor.top);
    if (cell) { this.moveTo(cell); this.choose(); }
  }

  onSelect(u) {
    const { left, top, width, height } = u.select;
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width > 6 && width < u.over.clientWidth) showSteps(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
    if (height > 6 && height < u.over.clientHeight) u.setScale("y", { min: Math.floor(u.posToVal(top, "y")), max: Math.ceil(u.posToVal(top + height, "y")) });
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const cell = this.cell ?? { y: 0, column: 0 }, last = this.columns.first.length - 1;
    const by = (y, column) => this.moveTo({ y: cell.y + y, column: cell.column + column });
    const keys = {
      ArrowUp: () => by(-1, 0), ArrowDown: () => by(1, 0), ArrowLeft: () => by(0, -1), ArrowRight: () => by(0, 1),
      PageUp: () => by(0, -10), PageDown: () => by(0, 10), Home: () => by(0, -cell.column), End: () => by(0, last),
      Enter: () => this.choose(), f: () => this.nextFinding(), "+": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.reset(),
    };
    const action = keys[event.key] ?? keys[event.key.toLowerCase()];
    if (action) { event.preventDefault(); note(this.chart); action(); }
  }

  nextFinding() {
    const stops = [...this.marks, ...this.runMarks].filter((mark) => mark.isFirst);
    if (!stops.length) return this.tell("There is no finding on this map.");
    this.finding = ((this.finding ?? -1) + 1) % stops.length;
    this.goTo(stops[this.finding]);
  }

  goTo(mark) { this.moveTo({ y: mark.y, column: nearest(this.columns.first, mark.step) }); }

  /** Put the keyboard's cursor on a cell, bring it into view, and say what is there. */
  moveTo({ y, column }) {
    const clamp = (value, most) => Math.min(Math.max(value, 0), most);
    this.cell = { y: clamp(y, this.order.length - 1), column: clamp(column, this.columns.first.length - 1) };
    const { min, max } = this.chart.scales.x, step = this.columns.first[this.cell.column];
    if (step < min || step > max) showSteps(step - (max - min) / 2, step + (max - min) / 2);
    const { min: top, max: bottom } = this.chart.scales.y;
    if (this.cell.y < top || this.cell.y >= bottom) this.chart.setScale("y", { min: 0, max: this.order.length });
    const { layer, steps, value, findings } = this.words(this.cell);
    this.tell([layer, steps, value, ...findings].join(" · "));
    this.chart.redraw(false, false);
  }

  choose() { if (this.cell) this.pick(this.order[this.cell.y]); }

  /** Note which layer's trends are shown. */
  mark(row) { this.picked = row; this.chart.redraw(false, false); }
}

/** Return the levels at the ends of the ramp: where nearly all values lie, wide enough that noise stays faint. */
function colourLimits(statistic, rows) {
  const levels = [];
  for (const row of rows) for (let i = 0; i < statistic.width; i++) {
    const level = levelOf(statistic.mid[row * statistic.width + i], statistic.scale);
    if (!Number.isNaN(level)) levels.push(level);
  }
  if (!statistic.scale.log) return { low: 0, high: Math.max(0.1, levels.reduce((a, b) => Math.max(a, b), 0)) };
  if (!levels.length) return { low: -3, high: 0 };
  levels.sort((a, b) => a - b);
  const low = levels[Math.floor(0.005 * levels.length)], high = levels[Math.ceil(0.995 * levels.length) - 1];
  const short = Math.max(3 - (high - low), 0); // at least three powers of ten
  return { low: low - short * 0.75, high: high + short * 0.25 };
}

/** Of two cells in one pixel, what must not be hidden: NaN, Inf, 0, then the smaller. */
const graver = (a, b) => (a === SIGN.missing ? b : b === SIGN.missing ? a : a < 0 || b < 0 ? Math.max(a < 0 ? a : -9, b < 0 ? b : -9) : Math.min(a, b));

/** Return names that fit: what all of them begin or end with is left out first, then the beginning of each. */
function shortened(names, letters) {
  if (names.every((name) => name.length <= letters)) return names;
  const parts = names.map((name) => name.split(".")), shortest = Math.min(...parts.map((of) => of.length)) - 1;
  const common = (at) => { let n = 0; while (n < shortest && parts.every((of) => of.at(at(n)) === parts[0].at(at(n)))) n++; return n; };
  const head = common((n) => n), tail = Math.min(common((n) => -1 - n), shortest - head);
  return parts.map((of) => {
    const name = of.slice(head, of.length - tail).join(".");
    const [before, after] = [head && "…", tail && "…"].map((dots) => dots || "");
    const room = letters - before.length - after.length;
    return name.length <= room ? before + name + after : `…${name.slice(name.length - letters + 1 + after.length)}${after}`;
  });
}

function frame(ctx, x, y, width, height, line) {
  for (const [colour, thick] of [[css("--page"), 2 * line], [css("--text"), line]]) {
    ctx.strokeStyle = colour; ctx.lineWidth = thick; ctx.strokeRect(x - line, y - line, width + 2 * line, height + 2 * line); // about it, not in it
  }
}

function triangle(ctx, x, y, size, colour) {
  ctx.beginPath(); ctx.moveTo(x, y); ctx.lineTo(x + size * 0.6, y + size); ctx.lineTo(x - size * 0.6, y + size); ctx.closePath();
  ctx.lineWidth = size / 4; ctx.lineJoin = "round"; ctx.strokeStyle = css("--page"); ctx.stroke();
  ctx.fillStyle = colour; ctx.fill();
}
