// Reads the packed numbers back: see gradwatch/render/report/encoding.py for how they were written.

const MISSING = 0, ZERO = 1 << 15, INFINITE = 65534, NAN = 65535;

/** Return the bytes behind the text: base64 of the zlib format. */
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Give every statistic its codes `low`, `mid`, `high`: one per row and column, row by row. */
function readStatistics(data, bytes) {
  let at = 0;
  const plane = (length) => {
    const codes = new Uint16Array(length);
    for (let i = 0; i < length; i++) codes[i] = bytes[at + i] | (bytes[at + length + i] << 8);
    at += 2 * length;
    return codes;
  };
  for (const statistic of data.statistics) {
    const columns = data.columns[statistic.columns];
    const length = columns.first.length * data.rows[statistic.of].length;
    statistic.width = columns.first.length;
    statistic.mid = statistic.low = statistic.high = plane(length);
    if (!columns.thinned) continue;
    const below = plane(length), above = plane(length); // stored as differences, modulo 2**16
    statistic.low = below.map((code, i) => statistic.mid[i] - code);
    statistic.high = above.map((code, i) => statistic.mid[i] + code);
  }
  return data;
}

/** Return whether a code is a number, 0 included. */
const isNumber = (code) => code !== MISSING && code < INFINITE;

/** Return the height of a code on its scale: a power of ten, or the fraction itself; NaN for what has none. */
function levelOf(code, scale) {
  if (!isNumber(code) || (code === ZERO && scale.log)) return NaN;
  return code === ZERO ? 0 : scale.low + (Math.abs(code - ZERO) - 1) * scale.step;
}

/** Return a code in words. */
function say(code, statistic) {
  if (code === MISSING) return "no value";
  if (code === NAN) return "NaN";
  if (code === INFINITE) return "Inf";
  if (code === ZERO) return "0";
  const level = levelOf(code, statistic.scale);
  if (!statistic.scale.log) return level === 0 ? "<0.1 %" : percent(level);
  return (code < ZERO ? "-" : "") + (statistic.unit === "elements" ? Math.round(10 ** level).toLocaleString("en") : digits(10 ** level));
}

/** Return a number with three digits. */
function digits(value) {
  if (value === Infinity) return "NaN or Inf";
  if (value === 0 || !Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
}

const percent = (fraction) => `${Number((100 * fraction).toPrecision(3))} %`;
const steps = (first, last) => (first === last ? `step ${first.toLocaleString("en")}` : `steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`);
