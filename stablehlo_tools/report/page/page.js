"use strict";
// Puts the page together.

const LEGEND = [
  ["product", "products and attention"],
  ["copy", "copies and slices"],
  ["compute", "other compute"],
  ["exposed", "exposed: the compute stream stands still"],
  ["hidden", "hidden communication: nothing waits for it"],
  ["loop", "further iterations of a loop"],
];

// The keys of the timelines that scroll no page: these work without the focus on one.
const KEYS_ANYWHERE = new Set(["+", "=", "-", "0", "n", "p", "c", "Escape"]);

/** What the colours mean, of those that the timelines have. */
function legend(programs) {
  const kindOf = (task) => (task.kind === "compute" ? kernelClass(task) : task.kind);
  const kinds = new Set(programs.flatMap((program) => program.descriptions.map(kindOf)));
  const drawn = { product: "product", copy: "copy", compute: "compute", exposed: "wait", hidden: "collective", loop: "loop" };
  return LEGEND.filter(([kind]) => kinds.has(drawn[kind])).map(([kind, text]) => element("li", {}, element("i", { class: kind }), text));
}

function noteLists(programs) {
  return programs
    .filter((program) => program.notes.length)
    .map((program) =>
      element(
        "div",
        {},
        programs.length > 1 ? element("h3", {}, program.label) : null,
        element("ul", {}, ...program.notes.map((note) => element("li", {}, note))),
      ),
    );
}

function themeButton() {
  const name = () => {
    byId("theme").textContent = `Theme: ${theme.choice}`;
  };
  byId("theme").addEventListener("click", () => theme.next());
  theme.listeners.push(name);
  name();
}

function start() {
  const report = readReport();
  const { programs } = report;
  byId("title").textContent = report.title;
  byId("lead").textContent = lead(programs);
  byId("cards").append(...cards(programs));
  byId("legend").append(...legend(programs));
  themeButton();

  const parts = Object.fromEntries(
    ["figures", "tooltip", "details", "range", "all", "out", "critical", "collectives", "filters"].map((id) => [id, byId(id)]),
  );
  parts.showRow = () => tables.showMarked();
  const tables = new CollectiveTables(report, parts, (row) => timeline.select(row));
  const timeline = new Timeline(report, parts, (selected) => tables.mark(report, selected));
  byId("in").addEventListener("click", () => timeline.view.zoom(0.5));
  byId("out").addEventListener("click", () => timeline.view.zoom(2));
  byId("all").addEventListener("click", () => timeline.view.set(0, timeline.view.limit));
  byId("critical").addEventListener("click", () => timeline.toggleCritical());
  document.addEventListener("keydown", (event) => {
    const nowhere = event.target === document.body && timeline.figures.length > 0;
    if (nowhere && KEYS_ANYWHERE.has(event.key)) timeline.key(event, timeline.figures[0]);
  });
  const waiting = timeline.figures.filter((figure) => figure.program.waits.length);
  byId("stall").disabled = waiting.length === 0;
  byId("stall").addEventListener("click", () => {
    const { selected } = timeline.state;
    timeline.step(waiting.find((figure) => figure.program.index === selected?.program) ?? waiting[0], 1);
  });

  byId("alive").append(...programs.map((program) => aliveTable(program).box));
  byId("kernels").append(...programs.map((program) => kernelTable(program).box));
  byId("loops").append(...programs.map((program) => loopTable(program).box));
  byId("notes").append(...noteLists(programs));
  byId("timeline-section").hidden = report.limit === 0;
  byId("memory-section").hidden = programs.every((program) => !program.alive.length);
  byId("kernels-section").hidden = programs.every((program) => !program.kernels.length);
  byId("loops-section").hidden = programs.every((program) => !program.loops.length);
  byId("notes-section").hidden = programs.every((program) => !program.notes.length);
  byId("footer").textContent = `stablehlo-tools ${report.version}. Times are modelled, but for those that a note calls measured.`;

  if (report.candidates.length) showCandidates(report.candidates);
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "Copied";
    });
  }
  window.addEventListener("beforeprint", () => theme.print(true));
  window.addEventListener("afterprint", () => theme.print(false));
}

start();
