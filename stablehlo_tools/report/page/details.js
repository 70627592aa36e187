"use strict";
// What is said about a task: shortly beside the pointer, fully in the panel under the timelines.

const SHOWN_HIDERS = 3;

/** The tasks that hide a collective, the longest first. */
function hiders(row, shown = SHOWN_HIDERS) {
  const sorted = [...row.hidden_by].sort((one, other) => other.ns - one.ns);
  const named = sorted.slice(0, shown).map((by) => `${by.name} ${time(by.ns)}`);
  const rest = sorted.length - shown;
  return named.join(", ") + (rest > 0 ? `, ${count(rest)} more` : "");
}

/** A task as title and facts. */
function taskFacts(program, stream, at, full) {
  const lane = program.lanes[stream];
  const task = program.descriptions[lane.what[at]];
  const row = program.rows.get(task.collective);
  const length = lane.end[at] - lane.begin[at];
  const facts = [["Time", `${moment(lane.begin[at])} – ${moment(lane.end[at])}, takes ${time(length)}`]];
  if (task.kind === "wait") {
    facts.push(["Exposed", `the compute stream stands still for ${time(length)}`]);
  } else if (task.kind === "collective") {
    const exposed = lane.exposed[at];
    facts.push(["Exposed", `${time(exposed)}, ${percent(exposed, length)} of this run`]);
  } else if (task.folded) {
    facts.push(["Stands for", `${plural(task.folded, "more iteration")}, not drawn one by one`]);
  }
  facts.push(["Op", task.op], ["Source", full ? task.place : shortPlace(task.place)]);
  if (row) facts.push(...collectiveFacts(row, full));
  if (full) {
    facts.push(["Stream", lane.name], ["Critical path", task.critical ? "yes" : ""]);
  }
  return { title: task.label, kind: task.kind, facts };
}

/** What a row says of its collective, all runs together. */
function collectiveFacts(row, full) {
  const hidden = hiders(row, full ? 8 : SHOWN_HIDERS);
  const facts = [
    ["Bytes", `${bytes(row.bytes)}${row.dtype ? ` ${row.dtype}` : ""}`],
    ["Groups", row.groups === "-" ? "" : row.groups],
    ["Axes", row.axes.join(", ")],
    ["All runs", `${plural(row.times, "run")}, ${time(row.ns)}, ${time(row.exposed_ns)} of it exposed`],
    ["Hidden by", hidden ? `${hidden}${row.times > 1 ? ", in all runs" : ""}` : "nothing"],
  ];
  if (!full) return facts;
  return [
    ...facts,
    ["Kind", row.kind],
    ["Algorithm", row.algorithm],
    ["Hideable", `${time(row.hideable_ns)} of ${time(row.ns)}`],
    ["Why not all", row.why],
  ];
}

/** The box beside the pointer. */
class Tooltip {
  constructor(box) {
    this.box = box;
  }

  show(x, y, title, facts) {
    this.box.replaceChildren(element("strong", {}, title), definitions(facts));
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const right = x + 16 + width > window.innerWidth;
    const below = y + 20 + height < window.innerHeight;
    this.box.style.left = `${Math.max(4, right ? x - 12 - width : x + 16)}px`;
    this.box.style.top = `${below ? y + 20 : Math.max(4, y - 12 - height)}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}

/** The panel that keeps what was clicked. */
class Details {
  constructor(box, onClose, onRow) {
    this.box = box;
    this.onClose = onClose;
    this.onRow = onRow;
  }

  show({ title, kind, facts }, program, hasRow) {
    const close = element(
      "button",
      { type: "button", class: "quiet", "aria-label": "Close the details", onclick: this.onClose },
      "✕",
    );
    this.box.replaceChildren(
      element(
        "div",
        { class: "details-head" },
        element("h3", { class: kind }, title),
        element("span", {}, program.label),
        hasRow ? element("button", { type: "button", class: "link", onclick: this.onRow }, "Show in the table") : null,
        close,
      ),
      definitions(facts),
    );
    this.box.hidden = false;
  }

  hide() {
    this.box.hidden = true;
    this.box.replaceChildren();
  }
}
