// Colours of the map: a sequential scale that is safe for the colour-blind, and signs of their own for what is no number.

const LEVELS = 256;
const NAN_COLOUR = "#e0007a";

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const packed = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r; // as ImageData holds it on every machine of today

/** Return a colour of the style sheet by its name there. */
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let stops = [];

/** Set the colours of the map, from small to large values: the same in both themes and in TensorBoard. */
function useScale(colours) {
  stops = colours.map(rgb);
}

/** Return the colours of the map: `ramp` from small to large, and two for each patterned sign. */
function palette() {
  const ramp = Int32Array.from({ length: LEVELS }, (_, i) => {
    const at = (i / (LEVELS - 1)) * (stops.length - 1), k = Math.min(Math.floor(at), stops.length - 2);
    return packed(stops[k].map((c, n) => Math.round(c + (at - k) * (stops[k + 1][n] - c))));
  });
  const page = packed(rgb(css("--page"))), line = packed(rgb(css("--line")));
  return { ramp, nan: [packed(rgb(NAN_COLOUR)), packed(rgb(NAN_COLOUR))], infinite: [packed(rgb(NAN_COLOUR)), page], zero: [packed([0, 0, 0]), packed([255, 255, 255])], missing: [page, line] };
}

/** Return the colour of one pixel of a cell: `kind` is a level of the ramp, or one of the signs. */
function pixel(colours, kind, x, y) {
  if (kind >= 0) return colours.ramp[kind];
  if (kind === SIGN.nan) return colours.nan[0];
  if (kind === SIGN.infinite) return colours.infinite[(x + y) % 8 < 5 ? 0 : 1];
  if (kind === SIGN.zero) return colours.zero[x % 6 < 2 && y % 6 < 2 ? 1 : 0];
  return colours.missing[(x + y) % 8 < 2 ? 1 : 0];
}

const SIGN = { nan: -1, infinite: -2, zero: -3, missing: -4 };
