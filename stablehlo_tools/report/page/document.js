"use strict";
// The embedded document, its columns decoded. What report/html.py writes, this reads.

/**
 * @typedef {object} Lane the tasks of one stream, by begin
 * @property {string} name
 * @property {Float64Array} begin nanoseconds
 * @property {Float64Array} end
 * @property {Float64Array} latest the largest end so far, to search by
 * @property {Float64Array} exposed of a collective: how long compute stands still for it
 * @property {Int32Array} what the number of the description
 */

const TURNS = /[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const DESCRIPTION = ["label", "op", "place", "kind", "collective", "folded", "critical"];

function readReport() {
  // Without the marks that turn the direction of text: a name may not reorder what follows it.
  const plain = (_, value) => (typeof value === "string" ? value.replace(TURNS, "") : value);
  const data = JSON.parse(document.getElementById("data").textContent, plain);
  const order = [...new Set(data.programs.flatMap((raw) => raw.streams))];
  const programs = data.programs.map((raw, index) => readProgram(inOrder(raw, order), index, data.strings));
  const named = new Set(programs.map((program) => program.name)).size === programs.length;
  for (const program of programs) {
    program.label = named ? program.name : `${program.name} (${program.target})`;
  }
  const ends = programs.flatMap((program) => [program.total_ns, ...program.lanes.map(lastEnd)]);
  return { ...data, programs, limit: Math.max(0, ...ends) };
}

/** A program whose streams have the order of the first program's. */
function inOrder(raw, order) {
  const places = raw.streams.map((_, at) => at).sort((one, other) => order.indexOf(raw.streams[one]) - order.indexOf(raw.streams[other]));
  return { ...raw, streams: places.map((at) => raw.streams[at]), lanes: places.map((at) => raw.lanes[at] ?? []) };
}

function readProgram(raw, index, strings) {
  const descriptions = raw.descriptions.map((numbers) => {
    const described = Object.fromEntries(DESCRIPTION.map((name, at) => [name, numbers[at]]));
    for (const name of DESCRIPTION.slice(0, 4)) described[name] = strings[described[name]];
    return described;
  });
  const lanes = raw.lanes.map((numbers, at) => readLane(numbers, raw.streams[at], raw.tick));
  const collectives = raw.collectives.map((row) => ({
    ...row,
    program: index,
    hidden_by: row.hidden_by.map(([name, ns]) => ({ name: strings[name], ns })),
  }));
  const program = {
    ...raw,
    index,
    descriptions,
    lanes,
    collectives,
    rows: new Map(collectives.map((row) => [row.number, row])),
    memory: readMemory(raw.memory, raw.tick),
  };
  nameWaits(program);
  program.folds = foldsOf(program);
  // What communication does after the last of compute is waited for by the end of the program.
  program.tail = { begin: lanes.length ? lastEnd(lanes[0]) : 0, end: Infinity };
  program.waits = waitsOf(program);
  program.waitsFor = Map.groupBy(program.waits, (wait) => wait.collective);
  for (const waits of program.waitsFor.values()) waits.push(program.tail);
  program.events = eventsByCollective(program);
  for (const lane of lanes) {
    for (let at = 0; at < lane.begin.length; at++) {
      const { kind, collective } = descriptions[lane.what[at]];
      if (kind !== "collective") continue;
      lane.exposed[at] = overlap(waitsFor(program, collective), lane.begin[at], lane.end[at]);
    }
  }
  return program;
}

function readLane(numbers, name, tick) {
  const length = numbers.length / 3;
  const lane = {
    name,
    begin: new Float64Array(length),
    end: new Float64Array(length),
    latest: new Float64Array(length),
    exposed: new Float64Array(length),
    what: new Int32Array(length),
  };
  let before = 0;
  for (let at = 0; at < length; at++) {
    const begin = before + numbers[3 * at];
    before = begin + numbers[3 * at + 1];
    lane.begin[at] = begin * tick;
    lane.end[at] = before * tick;
    lane.latest[at] = Math.max(lane.end[at], at ? lane.latest[at - 1] : 0);
    lane.what[at] = numbers[3 * at + 2];
  }
  return lane;
}

function readMemory(numbers, tick) {
  const length = numbers.length / 2;
  const curve = { time: new Float64Array(length), bytes: new Float64Array(length), peakAt: 0, peak: 0 };
  let before = 0;
  for (let at = 0; at < length; at++) {
    before += numbers[2 * at];
    curve.time[at] = before * tick;
    curve.bytes[at] = numbers[2 * at + 1];
    if (curve.bytes[at] > curve.peak) {
      curve.peak = curve.bytes[at];
      curve.peakAt = curve.time[at];
    }
  }
  return curve;
}

function lastEnd(lane) {
  return lane.latest.length ? lane.latest[lane.latest.length - 1] : 0;
}

/** When the compute stream stands still, and for which collective: by begin, none without length. */
function waitsOf(program) {
  const found = [];
  program.lanes.forEach((lane, stream) => {
    for (let at = 0; at < lane.begin.length; at++) {
      const { kind, collective } = program.descriptions[lane.what[at]];
      if (kind === "wait" && lane.end[at] > lane.begin[at]) {
        found.push({ begin: lane.begin[at], end: lane.end[at], collective, stream, at });
      }
    }
  });
  return found.sort((one, other) => one.begin - other.begin);
}

/** When a collective is waited for. */
function waitsFor(program, collective) {
  return program.waitsFor.get(collective) ?? [program.tail];
}

/** A wait is named for what it waits for. */
function nameWaits(program) {
  for (const task of program.descriptions) {
    const row = program.rows.get(task.collective);
    if (task.kind !== "wait" || !row) continue;
    task.label = `wait for ${row.name.startsWith(row.kind) || !row.name ? row.name || row.kind : `${row.kind} (${row.name})`}`;
  }
}

/** The blocks that stand for further iterations, and the lanes that have some. */
function foldsOf(program) {
  const blocks = [];
  program.lanes.forEach((lane, stream) => {
    for (let at = 0; at < lane.begin.length; at++) {
      if (!program.descriptions[lane.what[at]].folded) continue;
      blocks.push({ begin: lane.begin[at], end: lane.end[at], stream });
    }
  });
  return { blocks, streams: new Set(blocks.map((block) => block.stream)) };
}

/** `llama.py:142 in layer` of a place with its folders and the op's name in JAX. */
function shortPlace(place) {
  return place.replace(/^(?:.*\/)?([^/\s]+:\d+(?::\d+)?(?: in \S+)?)(?: \(.*\))?$/, "$1");
}

/** The events of each collective, as [stream, index]. */
function eventsByCollective(program) {
  const found = new Map();
  program.lanes.forEach((lane, stream) => {
    for (let at = 0; at < lane.begin.length; at++) {
      const { collective } = program.descriptions[lane.what[at]];
      if (collective < 0) continue;
      if (!found.has(collective)) found.set(collective, []);
      found.get(collective).push([stream, at]);
    }
  });
  return found;
}

/** The first index in 0..length that `holds`, of a condition that stays true once it is. */
function firstWhere(length, holds) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** How much of begin..end lies in the waits. */
function overlap(waits, begin, end) {
  let sum = 0;
  let at = firstWhere(waits.length, (index) => waits[index].end > begin);
  for (; at < waits.length && waits[at].begin < end; at++) {
    sum += Math.min(end, waits[at].end) - Math.max(begin, waits[at].begin);
  }
  return sum;
}

/** The bytes alive at a point of time. */
function aliveAt(curve, ns) {
  const after = firstWhere(curve.time.length, (index) => curve.time[index] > ns);
  return after ? curve.bytes[after - 1] : 0;
}
