"use strict";
// Tables: of collectives, sortable and filtered, and the small ones.

const SHORT_ROWS = 12; // a table up to here stays on one sheet of paper
const FIRST_ROWS = 100; // of a long table, until all are asked for

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {(row: any) => number | string} value what rows are sorted and filtered by
 * @property {(row: any) => (Node | string)[]} [cell] what is shown, where that is more
 * @property {boolean} [numeric]
 * @property {string} [hint]
 */

/** A table whose headers sort it. */
class SortedTable {
  /** @param {{caption: string, columns: Column[], rows: any[], by: number, onChoose?: (row: any) => void}} options */
  constructor({ caption, columns, rows, by, onChoose, none }) {
    Object.assign(this, { columns, rows, by, onChoose, none });
    this.descending = Boolean(columns[by].numeric);
    this.shown = rows;
    this.limit = FIRST_ROWS;
    this.marked = null;
    this.lines = new Map();
    this.caption = element("caption", {}, caption);
    this.body = element("tbody");
    this.heads = columns.map((column, at) => this.head(column, at));
    this.more = element("button", { type: "button", class: "more", onclick: () => this.showAll() });
    this.box = element(
      "div",
      { class: "tablebox" },
      element(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
        element("table", {}, this.caption, element("thead", { hidden: rows.length === 0 }, element("tr", {}, ...this.heads)), this.body),
      ),
      this.more,
    );
    this.render();
  }

  head(column, at) {
    const button = element("button", { type: "button", title: column.hint, onclick: () => this.sort(at) }, column.title);
    return element("th", { scope: "col", class: column.numeric ? "numeric" : "" }, button);
  }

  sort(at) {
    this.descending = at === this.by ? !this.descending : Boolean(this.columns[at].numeric);
    this.by = at;
    this.render();
  }

  filter(holds) {
    this.shown = this.rows.filter(holds);
    this.render();
  }

  showAll() {
    this.limit = Infinity;
    this.render();
  }

  /** Marks a row, and shows it where the table was cut off before it. */
  mark(row) {
    this.marked = row;
    for (const [own, line] of this.lines) line.classList.toggle("marked", own === row);
    if (!row) return;
    if (!this.lines.has(row)) {
      this.limit = Infinity;
      this.render();
    }
  }

  render() {
    const { value, numeric } = this.columns[this.by];
    const sign = this.descending ? -1 : 1;
    const compare = numeric
      ? (one, other) => (value(one) ?? -1) - (value(other) ?? -1)
      : (one, other) => String(value(one)).localeCompare(String(value(other)), "en", { numeric: true });
    const sorted = [...this.shown].sort((one, other) => sign * compare(one, other));
    this.heads.forEach((head, at) => {
      const way = this.descending ? "descending" : "ascending";
      head.setAttribute("aria-sort", at === this.by ? way : "none");
    });
    const visible = sorted.slice(0, this.limit);
    this.lines = new Map(visible.map((row) => [row, this.line(row)]));
    this.body.replaceChildren(...this.lines.values());
    if (!visible.length) {
      const text = this.rows.length ? "No row matches the filter." : this.none;
      this.body.append(element("tr", {}, element("td", { colspan: this.columns.length, class: "none" }, text)));
    }
    this.box.classList.toggle("short", visible.length <= SHORT_ROWS);
    const rest = sorted.length - visible.length;
    this.more.hidden = rest === 0;
    this.more.textContent = `Show the other ${count(rest)} of ${plural(sorted.length, "row")}`;
  }

  line(row) {
    const cells = this.columns.map((column) => {
      const content = column.cell ? column.cell(row) : [String(column.value(row))];
      return element("td", { class: column.numeric ? "numeric" : "" }, ...content);
    });
    const line = element("tr", { class: row === this.marked ? "marked" : "" }, ...cells);
    if (!this.onChoose) return line;
    line.classList.add("choice");
    line.addEventListener("click", () => {
      if (!window.getSelection()?.toString()) this.onChoose(row);
    });
    return line;
  }
}

/** Text of any length in a cell: cut on the screen after a few lines, whole on paper. */
function long(text, className = "") {
  const pieces = text.split(/(?<=[_/])|(?<=\.)(?=[A-Za-z])/).flatMap((piece, at) => (at ? [element("wbr"), piece] : [piece]));
  return [element("div", { class: `long ${className}`, title: text.length > 40 ? text : null }, ...pieces)];
}

function source(place) {
  const [cell] = long(shortPlace(place), "place");
  cell.title = place;
  return [cell];
}

/** Brings the timelines into sight; the click goes on to the row, which chooses the collective. */
function toTimeline() {
  byId("figures").scrollIntoView({ block: "nearest" });
}

/** @returns {Column[]} */
function collectiveColumns(program) {
  const most = Math.max(1, ...program.collectives.map((row) => row.exposed_ns));
  return [
    {
      title: "Collective",
      value: (row) => `${row.kind} ${row.name}`,
      cell: (row) => [
        element("button", { type: "button", class: "link", title: "Show in the timeline", onclick: toTimeline }, row.kind),
        element("div", { class: "sub", title: row.name }, row.name),
      ],
    },
    {
      title: "Exposed",
      hint: "For how long the compute stream stands still for it, in all runs together",
      numeric: true,
      value: (row) => row.exposed_ns,
      cell: (row) => [
        element("strong", { class: row.exposed_ns ? "exposed" : "zero" }, time(row.exposed_ns)),
        element("div", { class: "share", "--part": `${(100 * row.exposed_ns) / most}%` }),
      ],
    },
    { title: "Time", hint: "Of all runs together", numeric: true, value: (row) => row.ns, cell: (row) => [time(row.ns)] },
    { title: "Runs", hint: "How often it runs", numeric: true, value: (row) => row.times, cell: (row) => [count(row.times)] },
    {
      title: "Bytes",
      hint: "Of one run",
      numeric: true,
      value: (row) => row.bytes,
      cell: (row) => [bytes(row.bytes), element("div", { class: "sub", title: row.dtype }, row.dtype)],
    },
    { title: "Groups", value: (row) => row.groups, cell: (row) => long(row.groups) },
    { title: "Axes", value: (row) => row.axes.join(", "), cell: (row) => long(row.axes.join(", ")) },
    { title: "Algorithm", value: (row) => row.algorithm, cell: (row) => long(row.algorithm) },
    {
      title: "Hidden by",
      hint: "Compute that runs meanwhile; sorted by how long",
      numeric: false,
      value: (row) => hiders(row, 50),
      cell: (row) => long(hiders(row) || "nothing", row.hidden_by.length ? "" : "zero"),
    },
    {
      title: "Hideable",
      hint: "How much of its time independent compute could cover in any order",
      numeric: true,
      value: (row) => row.hideable_ns,
      cell: (row) => [time(row.hideable_ns), element("div", { class: "sub" }, percent(row.hideable_ns, row.ns))],
    },
    { title: "Why not all", value: (row) => row.why, cell: (row) => long(row.why) },
    { title: "Source", value: (row) => row.place, cell: (row) => source(row.place) },
  ];
}

/** The tables of collectives, one a program, under one filter. */
class CollectiveTables {
  constructor(report, parts, onChoose) {
    this.tables = report.programs.map((program) => {
      const columns = collectiveColumns(program);
      return new SortedTable({
        caption: `${program.label}: ${plural(program.collectives.length, "collective")}`,
        columns,
        rows: program.collectives,
        by: columns.findIndex((column) => column.title === "Exposed"),
        none: "This program has no collectives.",
        onChoose: (row) => onChoose(row),
      });
    });
    parts.collectives.append(...this.tables.map((table) => table.box));
    const rows = report.programs.flatMap((program) => program.collectives);
    const kinds = [...new Set(rows.map((row) => row.kind))].sort();
    this.words = element("input", { type: "search", placeholder: "Filter", "aria-label": "Filter by text", oninput: () => this.apply() });
    this.kind = element(
      "select",
      { "aria-label": "Kind", onchange: () => this.apply() },
      element("option", { value: "" }, "all kinds"),
      ...kinds.map((kind) => element("option", { value: kind }, kind)),
    );
    this.exposed = element("input", { type: "checkbox", onchange: () => this.apply() });
    if (rows.length) parts.filters.append(this.words, this.kind, element("label", {}, this.exposed, " exposed only"));
  }

  apply() {
    const words = this.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const table of this.tables) {
      table.filter((row) => {
        if (this.kind.value && row.kind !== this.kind.value) return false;
        if (this.exposed.checked && !row.exposed_ns) return false;
        const text = [row.kind, row.name, row.groups, ...row.axes, row.algorithm, row.dtype, row.stream, row.why, row.place];
        const all = [...text, ...row.hidden_by.map((by) => by.name)].join(" ").toLowerCase();
        return words.every((word) => all.includes(word));
      });
    }
  }

  showMarked() {
    const row = document.querySelector("tr.marked");
    row?.scrollIntoView({ block: "center" });
    row?.querySelector("button")?.focus({ preventScroll: true });
  }

  mark(report, selected) {
    this.tables.forEach((table, index) => {
      const own = selected && selected.program === index && selected.collective >= 0;
      table.mark(own ? report.programs[index].rows.get(selected.collective) : null);
    });
  }
}

function loopTable(program) {
  return new SortedTable({
    caption: program.label,
    rows: program.loops,
    by: 2,
    none: "This program has no loops.",
    columns: [
      { title: "Loop", value: (row) => row.name, cell: (row) => [element("div", { class: "nested", "--depth": row.depth }, ...long(row.name))] },
      {
        title: "Iterations",
        numeric: true,
        value: (row) => row.trips ?? -1,
        cell: (row) => [row.trips === null ? element("em", { title: "The count is not known; one iteration was timed" }, "unknown, 1 timed") : count(row.trips)],
      },
      { title: "Time", numeric: true, value: (row) => row.ns, cell: (row) => [time(row.ns)] },
      { title: "One iteration", hint: "In the steady state", numeric: true, value: (row) => row.period_ns, cell: (row) => [time(row.period_ns)] },
      { title: "Source", value: (row) => row.place, cell: (row) => source(row.place) },
    ],
  });
}

function kernelTable(program) {
  const share = (row) => (program.compute_ns ? row.ns / program.compute_ns : 0);
  return new SortedTable({
    caption: program.label,
    rows: program.kernels,
    by: 2,
    none: "This program has no kernels.",
    columns: [
      { title: "Kernel", value: (row) => row.name, cell: (row) => long(row.name) },
      { title: "Runs", numeric: true, value: (row) => row.times, cell: (row) => [count(row.times)] },
      { title: "Time", numeric: true, value: (row) => row.ns, cell: (row) => [time(row.ns)] },
      { title: "Of compute", numeric: true, value: share, cell: (row) => [percent(row.ns, program.compute_ns)] },
      { title: "Source", value: (row) => row.place, cell: (row) => source(row.place) },
    ],
  });
}

function aliveTable(program) {
  return new SortedTable({
    caption: `${program.label}: ${bytes(program.peak_bytes)} at ${moment(program.memory.peakAt)}`,
    rows: program.alive,
    by: 1,
    none: "The values live at the peak were not recorded.",
    columns: [
      { title: "Value", value: (row) => row.name, cell: (row) => long(row.name) },
      {
        title: "Bytes",
        numeric: true,
        value: (row) => row.bytes,
        cell: (row) => [bytes(row.bytes), element("div", { class: "sub" }, percent(row.bytes, program.peak_bytes))],
      },
      { title: "Source", value: (row) => row.place, cell: (row) => source(row.place) },
    ],
  });
}
