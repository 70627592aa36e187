"use strict";
// The timelines: one canvas a program, all on one time axis, and what pointer and keys do to it.

const LANE = { compute: 30, stream: 24, gap: 9, axis: 24, band: 16, memory: 78, bottom: 4 };
const LABEL_FONT = "12px";
const PAPER = 1500; // pixels across a printed page, before it is scaled
const NEAR = 3; // pixels by which the pointer may miss a task

/** The part of the time axis that every timeline shows. */
class View {
  constructor(limit, onChange) {
    this.limit = limit || 1;
    this.least = Math.max(this.limit * 1e-7, 1e-2);
    this.onChange = onChange;
    this.begin = 0;
    this.end = this.limit;
  }

  get span() {
    return this.end - this.begin;
  }

  set(begin, span) {
    const length = Math.min(this.limit, Math.max(this.least, span));
    this.begin = Math.min(Math.max(0, begin), this.limit - length);
    this.end = this.begin + length;
    this.onChange();
  }

  /** Makes the span `factor` times as long; the time `at` stays where it is. */
  zoom(factor, at = (this.begin + this.end) / 2) {
    const length = Math.min(this.limit, Math.max(this.least, this.span * factor));
    this.set(at - ((at - this.begin) * length) / this.span, length);
  }

  pan(ns) {
    this.set(this.begin + ns, this.span);
  }

  /** Shows begin..end with some room around it, without a change where it is seen well already. */
  reveal(begin, end) {
    const length = end - begin;
    const seen = begin >= this.begin && end <= this.end && length > 0.02 * this.span;
    if (!seen) this.set(begin - 2 * length, Math.max(5 * length, this.least));
  }

  get whole() {
    return this.span >= this.limit * (1 - 1e-9);
  }
}

/** The canvas of one program. */
class Figure {
  constructor(program, view, most) {
    this.program = program;
    this.view = view;
    this.most = most;
    this.canvas = element("canvas", { tabindex: 0, role: "application", "aria-describedby": "hint" });
    this.canvas.setAttribute("aria-label", `Timeline of ${program.label}`);
    const heading = element(
      "figcaption",
      {},
      element("strong", {}, program.label),
      ` ${program.target}, ${time(program.total_ns)}, ${time(program.exposed_ns)} exposed`,
    );
    this.box = element("figure", {}, heading, this.canvas);
    this.boxes = [];
    this.frames = 0;
  }

  /** Where lanes and memory curve stand at this width, in CSS pixels. */
  layout(width) {
    this.width = width;
    this.left = Math.round(Math.min(150, Math.max(104, 0.13 * width)));
    this.levels = [...new Set(this.program.bands.map(([, , , level]) => level))].sort();
    let top = LANE.axis + 6 + LANE.band * this.levels.length;
    this.boxes = this.program.lanes.map((_, stream) => {
      const height = stream === 0 ? LANE.compute : LANE.stream;
      const box = { top, height, full: stream === 0 };
      top += height + LANE.gap;
      return box;
    });
    this.memoryBox = { top: top + 2, height: this.program.memory.time.length ? LANE.memory : 0 };
    this.height = this.memoryBox.top + this.memoryBox.height + LANE.bottom;
    this.ratio = theme.printing ? 2 : window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
    this.canvas.style.aspectRatio = `${width} / ${this.height}`;
    this.context = this.canvas.getContext("2d");
    this.brush = null;
  }

  get scale() {
    const { begin, end, span } = this.view;
    const left = this.left;
    const width = Math.max(1, this.width - left - 1);
    const stop = Math.max(this.program.total_ns, ...this.program.lanes.map(lastEnd));
    return { begin, end, left, width, stop, x: (ns) => left + ((ns - begin) / span) * width };
  }

  timeAt(x) {
    return this.view.begin + ((x - this.left) / Math.max(1, this.width - this.left - 1)) * this.view.span;
  }

  /** New colours: the brush takes them up. */
  ink(colours, family) {
    this.brush = new Brush(this.context, colours, `${LABEL_FONT} ${family}`, this.ratio);
    this.fills = { loop: stripes(this.context, colours.loop, colours["loop-stripe"], this.ratio) };
  }

  draw({ criticalOnly, selected, cursor }) {
    const { brush, context, program, scale } = this;
    brush.drawn = 0;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    this.drawAxis(scale);
    context.save();
    context.beginPath();
    context.rect(scale.left, 0, scale.width, this.height);
    context.clip();
    this.drawBands(scale);
    this.drawFolds(scale);
    program.lanes.forEach((lane, stream) => {
      paintLane(brush, program, lane, this.boxes[stream], scale, this.fills, criticalOnly);
    });
    this.drawSelection(selected, scale);
    paintMemory(brush, program, this.memoryBox, scale, this.most);
    if (cursor !== null) this.drawCursor(cursor, scale);
    context.restore();
    this.drawNames();
    this.publish();
  }

  drawAxis(scale) {
    const { brush } = this;
    const { colours } = brush;
    const step = axisStep(this.view.span, scale.width / 96);
    const bottom = this.height - LANE.bottom;
    for (const [at, box] of this.boxes.entries()) {
      const extra = at === 0 ? 4 : 0;
      brush.rect(colours.lane, scale.left, box.top - extra, scale.width, box.height + 2 * extra);
    }
    const first = Math.ceil(scale.begin / step - 1e-9);
    for (let mark = first; mark * step <= scale.end; mark++) {
      const x = Math.round(scale.x(mark * step)) + 0.5;
      brush.line(colours.grid, x, LANE.axis - 4, x, bottom);
      const text = axisText(mark * step, step, scale.end);
      const half = brush.width(text) / 2;
      const middle = Math.min(Math.max(x, scale.left + half), this.width - half - 1);
      brush.text(colours.muted, text, middle, 9, { align: "center" });
    }
  }

  /** Phases of the step, and its layers, above the lanes: neighbours have other shades. */
  drawBands(scale) {
    const { brush } = this;
    const drawn = this.levels.map(() => 0);
    for (const [begin, end, label, of] of this.program.bands) {
      const level = this.levels.indexOf(of);
      const x0 = Math.max(scale.left, scale.x(begin));
      const x1 = Math.min(scale.left + scale.width, scale.x(end));
      const shade = drawn[level]++ % 2 ? "band-other" : "band";
      if (x1 - x0 < 1) continue;
      const top = LANE.axis + LANE.band * level;
      brush.rect(brush.colours[shade], x0, top, x1 - x0, LANE.band - 2);
      const shown = brush.fitted(label, x1 - x0 - 4);
      if (shown === label) brush.text(brush.colours.muted, shown, (x0 + x1) / 2, top + LANE.band / 2 - 1, { align: "center" });
    }
  }

  /** Iterations that are not drawn: behind the lanes that have no block of their own for them. */
  drawFolds(scale) {
    const { blocks, streams } = this.program.folds;
    this.boxes.forEach(({ top, height }, stream) => {
      if (streams.has(stream)) return;
      for (const { begin, end } of blocks) {
        const x0 = Math.max(scale.left, scale.x(begin));
        const x1 = Math.min(scale.left + scale.width, scale.x(end));
        if (x1 - x0 >= NARROWEST) this.brush.rect(this.fills.loop, x0, top, x1 - x0, height);
      }
    });
  }

  /** Frames around the events of the selected collective and the task that was clicked. */
  drawSelection(selected, scale) {
    if (!selected || selected.program !== this.program.index) return;
    const frames = selected.collective >= 0 ? (this.program.events.get(selected.collective) ?? []) : [];
    let drawnTo = new Float64Array(this.boxes.length).fill(-10);
    const pinned = selected.stream >= 0 ? [[selected.stream, selected.at]] : [];
    for (const [stream, at] of [...frames, ...pinned]) {
      const lane = this.program.lanes[stream];
      const own = pinned.length && stream === selected.stream && at === selected.at;
      if (lane.end[at] < scale.begin || lane.begin[at] > scale.end) continue;
      if (lane.end[at] === lane.begin[at] && !own) continue;
      const x0 = scale.x(lane.begin[at]);
      const x1 = Math.max(x0 + 2, scale.x(lane.end[at]));
      if (x1 <= drawnTo[stream] + 1 && !own) continue;
      drawnTo[stream] = x1;
      const { top, height } = this.boxes[stream];
      const extra = stream === 0 ? 5 : 1;
      const colour = own ? this.brush.colours.text : this.brush.colours.accent;
      this.brush.outline(colour, x0 - 0.5, top - extra, x1 - x0, height + 2 * extra);
    }
  }

  drawCursor(cursor, scale) {
    if (cursor < scale.begin || cursor > scale.end) return;
    const x = Math.round(scale.x(cursor)) + 0.5;
    this.brush.line(this.brush.colours.muted, x, LANE.axis - 4, x, this.height - LANE.bottom);
  }

  drawNames() {
    const { brush, boxes } = this;
    const room = this.left - 12;
    this.program.lanes.forEach((lane, stream) => {
      const { top, height } = boxes[stream];
      const weight = stream === 0 ? "600" : "normal";
      brush.text(brush.colours.text, brush.fitted(lane.name, room, weight), 0, top + height / 2, { weight });
    });
    if (!this.memoryBox.height) return;
    const { top, height } = this.memoryBox;
    brush.text(brush.colours.text, "memory", 0, top + height / 2);
    if (this.program.capacity_bytes > this.most) {
      const text = `of ${bytes(this.program.capacity_bytes)}`;
      brush.text(brush.colours.muted, brush.fitted(text, room), 0, top + height / 2 + 16);
    }
  }

  /** What tests and scripts read: the shown range and where the lanes are. */
  publish() {
    const { dataset } = this.canvas;
    this.frames++;
    dataset.frames = String(this.frames);
    dataset.drawn = String(this.brush.drawn);
    dataset.begin = String(this.view.begin);
    dataset.end = String(this.view.end);
    dataset.left = String(this.left);
    dataset.plot = String(this.scale.width);
    dataset.lanes = JSON.stringify([...this.boxes, this.memoryBox].map(({ top, height }) => [top, height]));
  }

  /** The stream under a point of the canvas; −1 for the memory curve, null elsewhere. */
  streamAt(y) {
    const stream = this.boxes.findIndex(({ top, height }) => y >= top - 4 && y < top + height + 4);
    if (stream >= 0) return stream;
    const { top, height } = this.memoryBox;
    return y >= top && y < top + height ? -1 : null;
  }

  /** The task under the pointer: the longest where several share a pixel. */
  taskAt(x, y) {
    const stream = this.streamAt(y);
    if (stream === null || stream < 0 || x < this.left) return null;
    const lane = this.program.lanes[stream];
    const from = this.timeAt(x - 0.5);
    const to = this.timeAt(x + 0.5);
    const exact = this.between(lane, from, to);
    const near = exact.length ? exact : this.between(lane, this.timeAt(x - NEAR), this.timeAt(x + NEAR));
    if (!near.length) return null;
    const part = (at) => Math.min(to, lane.end[at]) - Math.max(from, lane.begin[at]);
    const at = near.reduce((best, next) => (part(next) > part(best) ? next : best));
    const narrow = near.filter((index) => lane.end[index] - lane.begin[index] < to - from);
    return { stream, at, crowd: narrow.length > 1 ? near.length : 0 };
  }

  between(lane, from, to) {
    const found = [];
    let at = firstWhere(lane.begin.length, (index) => lane.latest[index] > from);
    for (; at < lane.begin.length && lane.begin[at] < to; at++) {
      const waits = this.program.descriptions[lane.what[at]].kind === "wait";
      if (lane.end[at] <= from || (waits && lane.end[at] === lane.begin[at])) continue;
      found.push(at);
    }
    return found;
  }
}

/** All figures, and what happens on them. `onSelect` hears which collective was chosen. */
class Timeline {
  constructor(report, parts, onSelect) {
    this.report = report;
    this.parts = parts;
    this.onSelect = onSelect;
    this.state = { criticalOnly: false, selected: null, cursor: null };
    this.view = new View(report.limit, () => this.redraw());
    this.tooltip = new Tooltip(parts.tooltip);
    this.details = new Details(parts.details, () => this.select(null), () => parts.showRow());
    const most = memoryTop(report.programs);
    this.figures = report.programs.map((program) => new Figure(program, this.view, most));
    parts.figures.append(...this.figures.map((figure) => figure.box));
    this.pending = 0;
    this.scrolled = 0;
    for (const figure of this.figures) this.listen(figure);
    window.addEventListener("scroll", () => (this.scrolled = performance.now()), { passive: true });
    new ResizeObserver(() => this.resize()).observe(parts.figures);
    theme.listeners.push(() => this.resize(true));
    this.resize(true);
  }

  resize(always = false) {
    const [first] = this.figures;
    const width = theme.printing ? PAPER : (first?.canvas.getBoundingClientRect().width ?? 0);
    if (!width || (!always && width === this.width)) return;
    this.width = width;
    const colours = palette();
    const family = getComputedStyle(document.body).fontFamily;
    for (const figure of this.figures) {
      figure.layout(width);
      figure.ink(colours, family);
    }
    this.draw();
  }

  /** Draws once before the next frame, however often it is asked to. */
  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.pending);
    this.pending = 0;
    for (const figure of this.figures) figure.draw(this.state);
    const { begin, end, span, whole, limit } = this.view;
    this.parts.range.textContent = whole
      ? `all ${time(limit)}`
      : `${axisText(begin, span / 100, end)} – ${axisText(end, span / 100, end)} of ${time(limit)}`;
    this.parts.all.disabled = whole;
    this.parts.out.disabled = whole;
  }

  listen(figure) {
    const { canvas } = figure;
    const pointers = new Map();
    let drag = null;
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      const ratio = figure.width / box.width;
      return { x: (event.clientX - box.left) * ratio, y: (event.clientY - box.top) * ratio };
    };
    canvas.addEventListener("wheel", (event) => this.wheel(event, figure, point(event)), { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, point(event));
      canvas.setPointerCapture(event.pointerId);
      drag = { from: point(event), moved: pointers.size > 1 };
    });
    canvas.addEventListener("pointermove", (event) => {
      const here = point(event);
      const before = pointers.get(event.pointerId);
      if (!before) return this.hover(figure, here, event);
      if (pointers.size === 2) this.pinch(figure, pointers, event.pointerId, here);
      else if (drag.moved || Math.abs(here.x - drag.from.x) > 4) {
        this.view.pan(figure.timeAt(drag.moved ? before.x : drag.from.x) - figure.timeAt(here.x));
        drag.moved = true;
        this.leave();
      } else return;
      pointers.set(event.pointerId, here);
      canvas.classList.add("dragged");
    });
    const release = (event) => {
      if (!pointers.delete(event.pointerId)) return;
      canvas.classList.remove("dragged");
      if (event.type === "pointerup" && drag && !drag.moved) this.click(figure, point(event));
      if (pointers.size === 0) drag = null;
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("keydown", (event) => this.key(event, figure));
  }

  wheel(event, figure, here) {
    // A page that is being scrolled scrolls on over the timelines.
    const scrolling = performance.now() - this.scrolled < 250 && !event.ctrlKey;
    if (scrolling || (this.view.whole && event.deltaY > 0)) return;
    event.preventDefault();
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.view.pan((sideways * lines * this.view.span) / figure.scale.width);
      return;
    }
    const speed = event.ctrlKey ? 0.01 : 0.002;
    const step = Math.max(-1, Math.min(1, event.deltaY * lines * speed));
    this.view.zoom(Math.exp(step), figure.timeAt(Math.max(figure.left, here.x)));
  }

  pinch(figure, pointers, id, here) {
    const [other] = [...pointers].filter(([key]) => key !== id).map(([, value]) => value);
    const before = pointers.get(id);
    const apart = (one) => Math.max(8, Math.hypot(one.x - other.x, one.y - other.y));
    const middle = figure.timeAt((before.x + other.x) / 2);
    this.view.zoom(apart(before) / apart(here), middle);
    this.view.pan(middle - figure.timeAt((here.x + other.x) / 2));
  }

  hover(figure, here, event) {
    this.state.cursor = here.x >= figure.left ? figure.timeAt(here.x) : null;
    this.redraw();
    const stream = figure.streamAt(here.y);
    const task = figure.taskAt(here.x, here.y);
    figure.canvas.classList.toggle("over", task !== null);
    const { program } = figure;
    if (task) {
      const { title, facts } = taskFacts(program, task.stream, task.at, false);
      const crowd = task.crowd ? [["Here", `${plural(task.crowd, "task")} on one pixel; the longest of them:`]] : [];
      this.tooltip.show(event.clientX, event.clientY, title, [...crowd, ...facts]);
    } else if (stream === -1 && this.state.cursor !== null) {
      const alive = aliveAt(program.memory, this.state.cursor);
      const facts = [["Time", moment(this.state.cursor)], ["Of the peak", percent(alive, program.memory.peak)]];
      this.tooltip.show(event.clientX, event.clientY, `${bytes(alive)} alive`, facts);
    } else if (stream !== null && stream >= 0 && here.x < figure.left) {
      this.tooltip.show(event.clientX, event.clientY, program.lanes[stream].name, []);
    } else this.tooltip.hide();
  }

  leave() {
    this.tooltip.hide();
    if (this.state.cursor === null) return;
    this.state.cursor = null;
    this.redraw();
  }

  click(figure, here) {
    const task = figure.taskAt(here.x, here.y);
    if (task) this.pin(figure, task.stream, task.at);
    else this.select(null);
  }

  /** Keeps the details of a task and marks its collective. */
  pin(figure, stream, at) {
    const { program } = figure;
    const { collective } = program.descriptions[program.lanes[stream].what[at]];
    this.state.selected = { program: program.index, collective, stream, at };
    this.details.show(taskFacts(program, stream, at, true), program, collective >= 0);
    this.onSelect(this.state.selected);
    this.redraw();
  }

  /** Marks a collective that was chosen in a table, or nothing. */
  select(row) {
    this.state.selected = null;
    this.details.hide();
    this.tooltip.hide();
    if (row) {
      const program = this.report.programs[row.program];
      this.state.selected = { program: row.program, collective: row.number, stream: -1, at: -1 };
      const title = `${row.kind} ${row.name}`;
      this.details.show({ title, kind: "collective", facts: [["Source", row.place], ["Stream", row.stream], ...collectiveFacts(row, true)] }, program, true);
      const events = program.events.get(row.number) ?? [];
      const bounds = events.map(([stream, at]) => [program.lanes[stream].begin[at], program.lanes[stream].end[at]]);
      const seen = bounds.some(([begin, end]) => begin < this.view.end && end > this.view.begin);
      if (bounds.length && !seen) this.view.reveal(...bounds[0]);
    }
    this.onSelect(this.state.selected);
    this.redraw();
  }

  /** Goes to the exposed wait after the shown one, or before it. */
  step(figure, direction) {
    const waits = figure.program.waits;
    if (!waits.length) return;
    const { selected } = this.state;
    const own = selected && selected.program === figure.program.index && selected.stream >= 0;
    const lane = own ? figure.program.lanes[selected.stream] : null;
    const now = lane ? lane.begin[selected.at] : this.view.begin - 1e-6;
    const after = firstWhere(waits.length, (at) => waits[at].begin > now);
    const before = firstWhere(waits.length, (at) => waits[at].begin >= now) - 1;
    const next = (direction > 0 ? after : before) + waits.length;
    const wait = waits[next % waits.length];
    this.view.reveal(wait.begin, wait.end);
    this.pin(figure, wait.stream, wait.at);
  }

  toggleCritical() {
    this.state.criticalOnly = !this.state.criticalOnly;
    this.parts.critical.setAttribute("aria-pressed", String(this.state.criticalOnly));
    this.redraw();
  }

  key(event, figure) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { view } = this;
    const actions = {
      "+": () => view.zoom(0.5),
      "=": () => view.zoom(0.5),
      "-": () => view.zoom(2),
      0: () => view.set(0, view.limit),
      ArrowLeft: () => view.pan(-0.2 * view.span),
      ArrowRight: () => view.pan(0.2 * view.span),
      Home: () => view.set(0, view.span),
      End: () => view.set(view.limit, view.span),
      n: () => this.step(figure, 1),
      p: () => this.step(figure, -1),
      c: () => this.toggleCritical(),
      Escape: () => this.select(null),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}
