"use strict";
// Figures as people read them: three significant digits and the unit that suits.

const TIME_UNITS = [["ns", 1], ["us", 1e3], ["ms", 1e6], ["s", 1e9]];
const BYTE_UNITS = [["B", 1], ["KiB", 1024], ["MiB", 1024 ** 2], ["GiB", 1024 ** 3], ["TiB", 1024 ** 4]];
const MINUS = "\u2212";
const NARROW = "\u202f"; // between a figure and its unit, where no line breaks
const COUNT = new Intl.NumberFormat("en-US");

/** `value` with so many significant digits and no exponent. */
function digits(value, significant = 3) {
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(significant));
  const whole = Math.floor(Math.log10(Math.abs(rounded))) + 1;
  return rounded.toFixed(Math.min(20, Math.max(0, significant - whole)));
}

function withUnit(value, units, significant) {
  if (value === null || !Number.isFinite(value)) return "unknown";
  const size = Math.abs(value);
  let unit = units[0];
  // A value that rounds up to the next unit is said in that: 1.00 us, not 1000 ns.
  for (const next of units.slice(1)) if (size / unit[1] >= 999.5) unit = next;
  const text = digits(size / unit[1], significant);
  const plain = unit === units[0] ? String(Number(text)) : text; // 64 B, not 64.0 B
  return `${value < 0 ? MINUS : ""}${plain}${NARROW}${unit[0]}`;
}

/** A length of time: 12.4 ms. */
function time(ns, significant = 3) {
  return withUnit(ns, TIME_UNITS, significant);
}

/** A point of time, exact enough to find it among its neighbours. */
function moment(ns) {
  return time(ns, 6).replace(/(\.\d*?)0+(?=\D)/, "$1").replace(/\.(?=\D)/, "");
}

function bytes(value) {
  return withUnit(value, BYTE_UNITS, 3);
}

/** A part of a whole; tiny parts are not said to be nothing. */
function percent(part, whole) {
  if (!whole) return `0${NARROW}%`;
  const value = (100 * part) / whole;
  if (value > 0 && value < 0.1) return `< 0.1${NARROW}%`;
  const text = Math.abs(value) < 99.95 ? digits(value, Math.abs(value) < 1 ? 1 : 3) : value.toFixed(0);
  return `${text.replace("-", MINUS)}${NARROW}%`;
}

/** A change, with its sign: −3.10 ms. */
function signed(value, format) {
  return value > 0 ? `+${format(value)}` : format(value);
}

function count(value) {
  return COUNT.format(value);
}

/** `1 run`, `32 runs`. */
function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** The distance of the marks of an axis: 1, 2 or 5 of a unit, so that about `room` fit in `span`. */
function axisStep(span, room) {
  const least = span / Math.max(1, room);
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least * (1 - 1e-9));
}

/** The text of a mark at `ns`, with as many decimals as the step needs. */
function axisText(ns, step, largest) {
  if (ns === 0) return "0";
  let unit = TIME_UNITS[0];
  for (const next of TIME_UNITS) if (largest >= next[1]) unit = next;
  const decimals = Math.max(0, -Math.floor(Math.log10(step / unit[1]) + 1e-9));
  return `${(ns / unit[1]).toFixed(Math.min(9, decimals))}${NARROW}${unit[0]}`;
}
