"use strict";
// The head of the page: what communication costs, in a sentence and in a card for each program.

/** The first sentence. */
function lead(programs) {
  if (programs.length === 0) return "There is no program here.";
  if (programs.length === 1) return leadOfOne(programs[0]);
  const [first, second] = programs;
  const rewritten = programs.length === 2 && (first.name !== second.name || first.target === second.target);
  if (rewritten) return leadOfTwo(first, second);
  const least = programs.reduce((best, next) => (next.exposed_ns < best.exposed_ns ? next : best));
  return (
    `Of ${programs.length} programs, ${least.label} has the least exposed communication: ` +
    `${time(least.exposed_ns)} of ${time(least.total_ns)}.`
  );
}

function leadOfOne(program) {
  const { total_ns: total, exposed_ns: exposed, floor_ns: floor } = program;
  if (!total) return "This program does nothing that takes time.";
  if (!program.collectives.length) {
    return `This program has no collectives: its ${time(total)} are compute.`;
  }
  const bound = `a lower bound for these tasks is ${time(floor)}${order(program)}.`;
  if (!exposed) return `All communication of these ${time(total)} is hidden behind compute; ${bound}`;
  return `${time(exposed)} of ${time(total)} is exposed communication; ${bound}`;
}

function leadOfTwo(before, after) {
  const totals = `the total ${moved(before.total_ns, after.total_ns)}`;
  const exposed = `Exposed communication ${moved(before.exposed_ns, after.exposed_ns)}`;
  const bound = `a lower bound for the tasks of ${after.label} is ${time(after.floor_ns)}${order(after)}.`;
  return `${exposed} and ${totals}; ${bound}`;
}

/** What the times of a program that was not compiled mean. */
function order({ target }) {
  return target === "as written" ? " (in the order of the program's text, before XLA reorders it)" : "";
}

function moved(before, after) {
  if (time(before) === time(after)) return `stays at ${time(after)}`;
  const verb = after < before ? "falls" : "rises";
  return `${verb} from ${time(before)} to ${time(after)}`;
}

/** A card for each program; those after the first say how they differ from it. */
function cards(programs) {
  const longest = Math.max(1, ...programs.map((program) => program.total_ns));
  return programs.map((program, index) => card(program, index ? programs[0] : null, longest));
}

function card(program, first, longest) {
  const above = program.total_ns - program.floor_ns;
  const room = program.capacity_bytes;
  return element(
    "article",
    { class: "card" },
    element(
      "h2",
      {},
      element("span", { class: "name", title: program.label }, program.label),
      element("span", { class: "target" }, program.target),
    ),
    element(
      "p",
      { class: "total" },
      element("strong", {}, time(program.total_ns)),
      " total",
      difference(program, first, "total_ns", time),
    ),
    program.total_ns ? lengths(program, longest) : null,
    definitions([
      [
        "Exposed",
        element("strong", { class: program.exposed_ns ? "exposed" : "" }, time(program.exposed_ns)),
        beside(`${percent(program.exposed_ns, program.total_ns)} of the total`),
        difference(program, first, "exposed_ns", time),
      ],
      [
        "Floor",
        element("strong", {}, time(program.floor_ns)),
        beside(program.floor_is),
        difference(program, first, "floor_ns", time),
      ],
      [
        "Above the floor",
        element("strong", {}, time(Math.max(0, above))),
        beside(longer(program)),
      ],
      [
        "Peak memory",
        element("strong", { class: fits(program) ? "" : "exposed" }, bytes(program.peak_bytes)),
        beside(room ? `${percent(program.peak_bytes, room)} of ${bytes(room)}` : ""),
        fits(program) ? null : beside("does not fit"),
        difference(program, first, "peak_bytes", bytes),
        peakParts(program),
      ],
      ["Runs on", `${program.hardware}, ${plural(program.devices, "device")}`],
    ]),
  );
}

/** The memory peak by purpose, as a bar and in words. */
function peakParts({ peak_parts: parts, peak_bytes: peak }) {
  const classes = ["weights and inputs", "optimizer state", "activations", "temporaries", "results"];
  const held = classes.map((name) => [name, parts[name] ?? 0]).filter(([, size]) => size > 0.005 * peak);
  if (!held.length) return null;
  return element(
    "div",
    { class: "parts" },
    element(
      "div",
      { class: "lengths", "aria-hidden": true },
      ...held.map(([name, size]) =>
        element("span", { class: `part${classes.indexOf(name)}`, "--part": `${(100 * size) / peak}%`, title: name }),
      ),
    ),
    ...held.map(([name, size]) =>
      element("span", { class: "beside" }, element("i", { class: `part${classes.indexOf(name)}` }), `${name} ${bytes(size)}`),
    ),
  );
}

/** Whether the memory peak is within the device's memory, where that is known. */
function fits({ peak_bytes: peak, capacity_bytes: room }) {
  return !room || peak <= room;
}

/** How much longer than its floor a program takes. */
function longer({ total_ns: total, floor_ns: floor }) {
  if (!floor || total <= floor) return "";
  return total < 2 * floor ? `${percent(total - floor, floor)} longer` : `${digits(total / floor)} × the floor`;
}

function beside(text) {
  return text ? element("span", { class: "beside" }, text) : null;
}

/** By how much a figure differs from the first program's, and whether that is good: less is. */
function difference(program, first, field, format) {
  if (!first) return null;
  const change = program[field] - first[field];
  if (format(program[field]) === format(first[field])) {
    return element("span", { class: "change" }, "unchanged");
  }
  const share = first[field] ? ` (${signed((100 * change) / first[field], (x) => percent(x, 100))})` : "";
  return element(
    "span",
    { class: change < 0 ? "change better" : "change worse", title: `compared with ${first.label}` },
    `${signed(change, format)}${share}`,
  );
}

/** The total as a bar on the scale of the longest program: compute, exposed, idle; and the floor. */
function lengths(program, longest) {
  const idle = Math.max(0, program.total_ns - program.compute_ns - program.exposed_ns);
  const part = (ns) => `${(100 * Math.max(0, ns)) / longest}%`;
  return element(
    "div",
    { class: "lengths", "aria-hidden": true },
    element("span", { class: "compute", "--part": part(program.compute_ns), title: `compute ${time(program.compute_ns)}` }),
    element("span", { class: "exposed", "--part": part(program.exposed_ns), title: `exposed ${time(program.exposed_ns)}` }),
    element("span", { class: "idle", "--part": part(idle), title: `other ${time(idle)}` }),
    program.floor_ns
      ? element("i", { "--part": part(program.floor_ns), title: `floor ${time(program.floor_ns)}` })
      : null,
  );
}
