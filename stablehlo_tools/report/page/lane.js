"use strict";
// One stream as a row of boxes. Boxes too narrow to see are added up by pixel column, so that what
// is drawn is bounded by the width of the screen, not by the number of tasks.

const NARROWEST = 2; // pixels; below, a task is added to its columns
const COLUMN = 3; // pixels
const SPLITS = 12; // a column is filled by twelfths
const LEAST_FILLED = 4; // of those, so that a single short task is seen
// exposed last: it is never rounded away
const CLASSES = ["compute", "product", "copy", "hidden", "loop", "exposed"];
const KERNELS = [
  ["product", /dot|gemm|cublas|cudnn|fmha|conv(?!ert)|attention|flash|pallas|tpu_custom_call/i],
  ["copy", /copy|slice|concatenate|transpose|gather|scatter|pad/i],
];
const EXPOSED = CLASSES.indexOf("exposed");
const FADED = 0.2;

/** The class of a kernel, by the names of its op and of itself. */
function kernelClass(task) {
  task.kernel ??= KERNELS.find(([, names]) => names.test(`${task.op} ${task.label}`))?.[0] ?? "compute";
  return task.kernel;
}

/** Draws on a canvas, counts what it draws and knows how wide text is. */
class Brush {
  constructor(context, colours, font, ratio) {
    this.context = context;
    this.ratio = ratio; // pixels of the screen to one of CSS
    this.colours = colours;
    this.font = font;
    this.drawn = 0;
    this.widths = new Map();
  }

  /** A box whose left and right edges are set to whole pixels, so that they are sharp. */
  rect(colour, x, y, width, height, alpha = 1) {
    const from = Math.round(x * this.ratio) / this.ratio;
    const to = Math.round((x + width) * this.ratio) / this.ratio;
    this.context.globalAlpha = alpha;
    this.context.fillStyle = colour;
    this.context.fillRect(from, y, Math.max(1 / this.ratio, to - from), height);
    this.context.globalAlpha = 1;
    this.drawn++;
  }

  outline(colour, x, y, width, height) {
    this.context.strokeStyle = colour;
    this.context.lineWidth = 2;
    this.context.strokeRect(x, y, width, height);
    this.drawn++;
  }

  line(colour, x0, y0, x1, y1, dash = []) {
    const { context } = this;
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
    context.setLineDash([]);
    this.drawn++;
  }

  text(colour, text, x, y, { align = "left", weight = "normal", alpha = 1 } = {}) {
    const { context } = this;
    context.globalAlpha = alpha;
    context.font = `${weight} ${this.font}`;
    context.fillStyle = colour;
    context.textAlign = align;
    context.textBaseline = "middle";
    context.fillText(text, x, y);
    context.globalAlpha = 1;
    this.drawn++;
  }

  width(text, weight = "normal") {
    const key = `${weight} ${text}`;
    if (!this.widths.has(key)) {
      this.context.font = `${weight} ${this.font}`;
      this.widths.set(key, this.context.measureText(text).width);
    }
    return this.widths.get(key);
  }

  /** `text` cut so that it fits, "" where not even a few letters do. */
  fitted(text, room, weight = "normal") {
    if (room < 20) return "";
    if (this.width(text, weight) <= room) return text;
    const letters = Array.from(text);
    let fits = Math.floor((letters.length * room) / this.width(text, weight));
    while (fits > 2 && this.width(`${letters.slice(0, fits).join("")}…`, weight) > room) fits--;
    return fits > 2 ? `${letters.slice(0, fits).join("")}…` : "";
  }
}

/** Diagonal stripes, for what is not drawn one by one; `slope` 1 or −1. */
function stripes(context, ground, stripe, ratio) {
  const size = 7;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(size * ratio);
  const pen = tile.getContext("2d");
  pen.scale(tile.width / size, tile.width / size);
  pen.fillStyle = ground;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = stripe;
  pen.lineWidth = 1.5;
  for (const from of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(from - 1, size + 1);
    pen.lineTo(from + size + 1, -1);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(size / tile.width));
  return pattern;
}

/**
 * Sums of what the columns of a lane hold, by class and by whether it is faded. A column is as high
 * as it is full, the whole lane where that is `full`, and divided as the classes share it.
 */
class Columns {
  constructor(width) {
    this.width = Math.ceil(width / COLUMN);
    this.sums = [0, 1].map(() => CLASSES.map(() => new Float32Array(this.width)));
    this.any = false;
  }

  /** Adds x0..x1, in pixels from the left. */
  add(faded, kind, x0, x1) {
    const sums = this.sums[faded ? 1 : 0][CLASSES.indexOf(kind)];
    this.any = true;
    const from = x0 / COLUMN;
    const to = x1 / COLUMN;
    const last = Math.min(this.width - 1, Math.floor(to));
    for (let column = Math.max(0, Math.floor(from)); column <= last; column++) {
      const part = Math.min(to, column + 1) - Math.max(from, column);
      sums[column] += Math.max(part, 1e-4); // a task without length is still there
    }
  }

  /** Draws the columns, equal neighbours as one. */
  paint(brush, scale, box) {
    if (!this.any) return;
    for (const faded of [0, 1]) {
      let from = 0;
      let before = null;
      for (let column = 0; column <= this.width; column++) {
        const filled = column < this.width ? this.filled(faded, column, box.full) : null;
        if (filled?.join() === before?.join()) continue;
        const x = from * COLUMN;
        const width = Math.min(column * COLUMN, scale.width) - x;
        if (before) this.run(brush, before, { ...box, x: scale.left + x, width }, faded ? FADED : 1);
        from = column;
        before = filled;
      }
    }
  }

  /** How many twelfths of the column each class fills; null if nothing is there. */
  filled(faded, column, full) {
    const values = this.sums[faded].map((sums) => sums[column]);
    const sum = values.reduce((one, other) => one + other);
    if (!sum) return null;
    const all = full ? SPLITS : Math.max(LEAST_FILLED, Math.min(SPLITS, Math.ceil(SPLITS * sum)));
    const parts = values.map((value) => Math.round((all * value) / sum));
    if (values[EXPOSED] > 0.02 * sum) parts[EXPOSED] = Math.max(1, parts[EXPOSED]);
    return parts;
  }

  run(brush, parts, box, alpha) {
    const sum = parts.reduce((one, other) => one + other);
    const whole = box.full ? sum : Math.max(SPLITS, sum);
    let y = box.top + box.height;
    parts.forEach((part, kind) => {
      if (!part) return;
      const height = (box.height * part) / whole;
      y -= height;
      brush.rect(brush.colours[CLASSES[kind]], box.x, y, box.width, height, alpha);
    });
  }
}

/**
 * Draws the tasks of a lane that lie in the view: first the columns, then what is wide enough, and
 * last the waits, so that nothing covers them.
 *
 * @param {{x: (ns: number) => number, left: number, width: number, begin: number, end: number}} scale
 * @param {{top: number, height: number, full: boolean}} box `full` where there is always work: its
 *   columns are divided, not partly filled
 */
function paintLane(brush, program, lane, box, scale, fills, criticalOnly) {
  const columns = new Columns(scale.width);
  const right = scale.left + scale.width;
  const wide = [];
  const waits = [];
  for (const { at, task, x0, x1, columnar } of visibleTasks(program, lane, scale)) {
    if (!columnar) {
      const to = Math.min(right, Math.max(x1, x0 + NARROWEST));
      (task.kind === "wait" ? waits : wide).push([at, task, Math.max(scale.left, x0), to]);
      continue;
    }
    const faded = criticalOnly && !task.critical;
    const from = x0 - scale.left;
    const to = x1 - scale.left;
    if (task.kind === "collective") {
      const length = lane.end[at] - lane.begin[at];
      const exposed = length ? lane.exposed[at] / length : 0;
      const middle = from + (to - from) * (1 - exposed);
      if (exposed < 1) columns.add(faded, "hidden", from, middle);
      if (exposed > 0) columns.add(faded, "exposed", middle, to);
    } else columns.add(faded, task.folded ? "loop" : task.kind === "wait" ? "exposed" : kernelClass(task), from, to);
  }
  columns.paint(brush, scale, box);
  for (const [at, task, from, to] of [...wide, ...waits]) {
    paintTask(brush, program, lane, at, task, { ...box, from, to }, scale, fills, criticalOnly && !task.critical);
  }
}

/**
 * The tasks in the view, where they are in pixels, and whether they go into columns: narrow ones do,
 * but for one that stands alone between wide ones or gaps.
 */
function visibleTasks(program, lane, scale) {
  const found = [];
  let at = firstWhere(lane.begin.length, (index) => lane.latest[index] >= scale.begin);
  for (; at < lane.begin.length && lane.begin[at] <= scale.end; at++) {
    const task = program.descriptions[lane.what[at]];
    if (task.kind === "wait" && lane.end[at] === lane.begin[at]) continue; // it did not stand still
    const x0 = scale.x(lane.begin[at]);
    const x1 = scale.x(lane.end[at]);
    found.push({ at, task, x0, x1, columnar: x1 - x0 < NARROWEST });
  }
  let close = false; // whether the task before is narrow too, and near
  found.forEach((own, index) => {
    const after = found[index + 1];
    const narrow = own.columnar;
    const next = narrow && Boolean(after?.columnar) && after.x0 - own.x1 < 2 * COLUMN;
    own.columnar = narrow && (close || next);
    close = next;
  });
  return found;
}

function paintTask(brush, program, lane, at, task, box, scale, fills, faded) {
  const { from, to, top, height } = box;
  const width = Math.max(1, to - from - (to - from > 4 ? 1 : 0));
  const alpha = faded ? FADED : 1;
  const { colours } = brush;
  if (task.folded) {
    brush.rect(fills.loop, from, top, width, height, alpha);
    const label = `× ${count(task.folded)} more iteration${task.folded === 1 ? "" : "s"}`;
    const shown = brush.fitted(label, width - 10);
    if (!shown) return;
    const room = brush.width(shown) + 10;
    brush.rect(colours.loop, from + (width - room) / 2, top + 3, room, height - 6);
    brush.text(colours["loop-text"], shown, from + width / 2, top + height / 2, { align: "center" });
    return;
  }
  let ink = `${task.kind === "wait" ? "exposed" : "compute"}-text`;
  let room = width;
  if (task.kind === "wait") {
    // Taller than its neighbours: told apart without colour too.
    brush.rect(colours.exposed, from, top - 4, width, height + 8, alpha);
  } else if (task.kind === "collective") {
    if (width <= NARROWEST) {
      // Too narrow for parts: what most of it is.
      const exposed = 2 * lane.exposed[at] > lane.end[at] - lane.begin[at];
      brush.rect(exposed ? colours.exposed : colours.hidden, from, top, width, height, alpha);
      return;
    }
    brush.rect(colours.hidden, from, top, width, height, alpha);
    const waits = waitsFor(program, task.collective);
    const first = paintExposed(brush, waits, lane, at, { ...box, to: from + width }, scale, alpha);
    const hidden = first[0] - from;
    ink = hidden > 24 ? "hidden-text" : "exposed-text";
    room = hidden > 24 ? hidden : first[1] - from;
  } else {
    brush.rect(colours[kernelClass(task)], from, top, width, height, alpha);
  }
  const weight = task.kind === "wait" ? "600" : "normal";
  const shown = brush.fitted(task.label, room - 9, weight);
  if (!shown) return;
  brush.text(colours[ink], shown, from + 5, top + height / 2 + 0.5, { weight, alpha: faded ? 0.55 : 1 });
}

/** The parts of a collective that are waited for; returns where the first begins and ends. */
function paintExposed(brush, waits, lane, at, box, scale, alpha) {
  const begin = Math.max(scale.begin, lane.begin[at]);
  const end = Math.min(scale.end, lane.end[at]);
  let wait = firstWhere(waits.length, (index) => waits[index].end > begin);
  let first = null;
  let drawnTo = box.from;
  for (; wait < waits.length && waits[wait].begin < end; wait++) {
    const x0 = Math.max(drawnTo, scale.x(waits[wait].begin));
    const x1 = Math.min(box.to, Math.max(x0 + 1, scale.x(waits[wait].end)));
    if (x1 <= x0) continue;
    brush.rect(brush.colours.exposed, x0, box.top, x1 - x0, box.height, alpha);
    first ??= [x0, x1];
    drawnTo = x1;
  }
  return first ?? [box.to, box.to];
}
