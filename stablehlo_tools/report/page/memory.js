"use strict";
// The memory curve under the lanes, on their time axis.

/** Bytes at the top of every curve: the capacity, where the peak comes near it. */
function memoryTop(programs) {
  const peak = Math.max(1, ...programs.map((program) => program.memory.peak));
  const near = programs.map((program) => program.capacity_bytes).filter((room) => inSight(room, peak));
  return Math.max(1.3 * peak, ...near.map((room) => 1.12 * room));
}

function inSight(capacity, peak) {
  return capacity > 0 && capacity <= 2 * peak;
}

function paintMemory(brush, program, box, scale, most) {
  const { memory } = program;
  if (!memory.time.length) return;
  const { colours, context } = brush;
  const y = (size) => box.top + box.height * (1 - size / most);
  const bottom = box.top + box.height;
  const right = scale.left + scale.width;
  const points = memoryPoints(memory, scale);
  context.beginPath();
  context.moveTo(scale.left, y(points[0][1]));
  for (const [x, size] of points) context.lineTo(x, y(size));
  context.strokeStyle = colours["memory-line"];
  context.lineWidth = 1.25;
  context.stroke();
  context.lineTo(right, bottom);
  context.lineTo(scale.left, bottom);
  context.fillStyle = colours.memory;
  context.fill();
  brush.drawn += points.length;
  brush.line(colours.line, scale.left, bottom + 0.5, right, bottom + 0.5);
  const peakBox = paintPeak(brush, memory, y, box, scale);
  if (!(program.capacity_bytes > 0 && program.capacity_bytes <= most)) return;
  const level = Math.round(y(program.capacity_bytes)) + 0.5;
  brush.line(colours.limit, scale.left, level, right, level, [6, 4]);
  const text = `capacity ${bytes(program.capacity_bytes)}`;
  const width = brush.width(text);
  // On the right, or on the left where the mark of the peak stands there.
  const taken = peakBox && peakBox.top < level + 16 && peakBox.right > right - width - 12;
  const x = taken ? scale.left + 4 : right - width - 4;
  brush.text(colours.limit, text, x, level + 9);
}

/** The curve as corners of its steps; where those are dense, the largest of each pixel column. */
function memoryPoints(memory, scale) {
  const from = firstWhere(memory.time.length, (at) => memory.time[at] > scale.begin);
  const to = firstWhere(memory.time.length, (at) => memory.time[at] >= scale.end);
  let level = from ? memory.bytes[from - 1] : 0;
  const points = [[scale.left, level]];
  if (to - from <= 2 * scale.width) {
    for (let at = from; at < to; at++) {
      const x = scale.x(memory.time[at]);
      points.push([x, level], [x, memory.bytes[at]]);
      level = memory.bytes[at];
    }
  } else {
    let column = -1;
    let most = 0;
    for (let at = from; at < to; at++) {
      const here = Math.floor(scale.x(memory.time[at]));
      if (here !== column && column >= 0) points.push([column, most]);
      most = here === column ? Math.max(most, memory.bytes[at]) : Math.max(level, memory.bytes[at]);
      column = here;
      level = memory.bytes[at];
    }
    if (column >= 0) points.push([column, most]);
  }
  // Past the program's end nothing is drawn: a shorter program stops before a longer one.
  points.push([Math.min(scale.left + scale.width, Math.max(scale.left, scale.x(scale.stop))), level]);
  points.push([points.at(-1)[0], 0]);
  return points;
}

/** A mark at the peak, and where its text stands. */
function paintPeak(brush, memory, y, box, scale) {
  if (memory.peakAt < scale.begin || memory.peakAt > scale.end) return null;
  const x = Math.min(Math.max(scale.x(memory.peakAt), scale.left + 3), scale.left + scale.width - 3);
  const top = y(memory.peak);
  const { context, colours } = brush;
  context.beginPath();
  context.arc(x, top, 3, 0, 2 * Math.PI);
  context.fillStyle = colours.text;
  context.fill();
  brush.drawn++;
  const text = `peak ${bytes(memory.peak)}`;
  const width = brush.width(text, "600");
  const middle = Math.min(Math.max(x, scale.left + width / 2 + 4), scale.left + scale.width - width / 2 - 4);
  const above = Math.max(box.top + 6, top - 11);
  brush.text(colours.text, text, middle, above, { align: "center", weight: "600" });
  return { right: middle + width / 2, top: above - 8 };
}
