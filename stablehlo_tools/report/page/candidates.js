"use strict";
// The candidates of a search as points, by uPlot: the export, the answer, and all others.

/** Draws the chart again when its width or the colours change. */
function showCandidates(candidates) {
  byId("candidates-section").hidden = false;
  const draw = () => byId("candidates").replaceChildren(candidateChart(candidates, byId("candidates").clientWidth));
  new ResizeObserver(draw).observe(byId("candidates-section"));
  theme.listeners.push(draw);
}

function candidateChart(candidates, width) {
  const colours = palette();
  const series = [
    { name: "the export", colour: colours.muted, size: 11, has: (at) => at === 0 },
    { name: "the answer", colour: colours.exposed, size: 13, has: (at) => at === 1 },
    { name: "other candidates", colour: colours["memory-line"], size: 7, has: (at) => at > 1 },
  ];
  const points = candidates
    .map((point, at) => ({ ns: point?.[0], size: point?.[1], label: point?.[2], at }))
    .filter(({ ns }) => ns !== undefined)
    .sort((one, other) => one.ns - other.ns);
  const axis = { stroke: colours.muted, grid: { stroke: colours.grid }, ticks: { stroke: colours.line } };
  const host = element("div");
  const shown = element("p", { class: "hint" }, "Point at a candidate to read its passes.");
  new uPlot(
    {
      width: Math.max(280, width - 4),
      height: 300,
      scales: { x: { time: false } },
      cursor: { points: { show: false }, drag: { x: false, y: false } },
      axes: [
        { ...axis, label: "time", values: (_, marks) => marks.map((mark) => time(mark)) },
        { ...axis, label: "peak memory", size: 84, values: (_, marks) => marks.map((mark) => bytes(mark)) },
      ],
      series: [
        { label: "time", value: (_, ns) => (ns === null ? "" : time(ns)) },
        ...series.map(({ name, colour, size }) => ({
          label: name,
          stroke: colour,
          paths: () => null,
          points: { show: true, size, fill: colour, stroke: colours.surface, width: 1 },
          value: (_, held) => (held === null || held === undefined ? "" : bytes(held)),
        })),
      ],
      hooks: {
        setCursor: [
          (chart) => {
            const point = points[chart.cursor.idx];
            if (point) shown.textContent = `${time(point.ns)}, ${bytes(point.size)}: ${point.label}`;
          },
        ],
      },
    },
    [points.map(({ ns }) => ns), ...series.map(({ has }) => points.map(({ at, size }) => (has(at) ? size : null)))],
    host,
  );
  return element("div", {}, host, shown);
}
