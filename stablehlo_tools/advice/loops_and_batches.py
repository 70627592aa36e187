"""Detects what a pass would gain by running it: collectives of loops, and the batch in parts.

A pass runs on a copy of the program with explicit collectives, if what it improves is there and
costs enough. Both programs are then timed in a compiler's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stablehlo_tools.advice.collective_uses import added_up
from stablehlo_tools.advice.program import Collective, Program
from stablehlo_tools.diagnostics import duration
from stablehlo_tools.overlap.bounds import could_go_ahead, independence
from stablehlo_tools.overlap.collective_times import graphs_of, loop_compute
from stablehlo_tools.report.document import Advice

_HIDEABLE = 0.9  # least share of a collective's time that compute can hide


def reductions_in_every_iteration(program: Program) -> Iterator[Advice]:
    """Detects reductions in a loop that sums them: gradients reduced for each microbatch."""
    reduced = [
        each for each in _in_loops(program) if added_up(each.op) and not program.is_sunk(each)
    ]
    steps = "pipeline-collectives{direction=sink}"
    after = _after(program, reduced, steps)
    if after is None:
        return
    first = max(reduced, key=lambda each: each.ns)
    yield from _gained(
        program,
        after,
        "reduced-in-every-iteration",
        f"{_counted(reduced, 'reduction')} in a loop of what the loop only adds up: {first.times} "
        f"times a step, {duration(sum(each.ns for each in reduced))} together",
        first,
        "accumulate what each device has and reduce the sum once, behind the loop",
        steps,
        spares=True,
    )


def repeated_for_microbatches(program: Program) -> Iterator[Advice]:
    """Detects collectives of a layer loop that each microbatch repeats: mainly of weights."""
    repeated = [each for each in _in_loops(program) if len(each.path) > 1]
    steps = "pipeline-collectives{direction=once}"
    after = _after(program, repeated, steps)
    if after is None:
        return
    left = {str(each.op.location) for each in after.collectives if len(each.path) > 1}
    gone = [each for each in repeated if str(each.op.location) not in left] or repeated
    first = max(gone, key=lambda each: each.ns)
    yield from _gained(
        program,
        after,
        "repeated-for-microbatches",
        f"{_counted(gone, 'collective')} of layers, sent anew for each microbatch: "
        f"{duration(sum(each.ns for each in gone))} together",
        first,
        "gather the weights of all layers once before the loop over microbatches, and reduce the "
        "gradients once behind it",
        steps,
        spares=True,
    )


def gathers_to_prefetch(program: Program) -> Iterator[Advice]:
    """Detects gathers that each iteration waits for, but the one before could issue."""
    ahead = {
        ((*path, task.id), start)
        for path, graph in graphs_of(program.graph)
        for task in graph.tasks
        if task.loop is not None
        for start in could_go_ahead(task.loop)
    }
    waited = [each for each in _in_loops(program) if (each.path, each.task) in ahead]
    steps = "pipeline-collectives{direction=prefetch}"
    after = _after(program, waited, steps)
    if after is None:
        return
    first = max(waited, key=lambda each: each.exposed_ns)
    yield from _gained(
        program,
        after,
        "gather-not-hidden",
        f"{_counted(waited, 'collective')} of a loop that each iteration waits for, "
        f"{duration(sum(each.exposed_ns for each in waited))} in all, though what is sent is there "
        "an iteration earlier",
        first,
        "issue them one iteration ahead",
        steps,
    )


def batch_to_split(program: Program) -> Iterator[Advice]:
    """Detects collectives that no compute of the same batch can hide: of tensor parallelism."""
    free = {
        path: independence(graph, loop_compute(graph)) for path, graph in graphs_of(program.graph)
    }
    stuck = [
        each
        for each in program.collectives
        if free[each.path][each.task].free_ns < _HIDEABLE * each.each_ns
    ]
    steps = "split-batch{parts=2}"
    after = _after(program, stuck, steps)
    if after is None:
        return
    first = max(stuck, key=lambda each: each.exposed_ns)
    yield from _gained(
        program,
        after,
        "batch-in-one-part",
        f"{_counted(stuck, 'collective')} that all compute of the batch feeds or waits for: "
        f"{duration(sum(each.exposed_ns for each in stuck))} exposed",
        first,
        "split the batch of each device in two: one part computes while the other communicates",
        steps,
    )


def streams_in_flight(program: Program) -> Iterator[Advice]:
    """Detects collectives over different networks that XLA:GPU runs one after the other."""
    streams = {each.sent.stream for each in program.collectives}
    if program.clock.hardware.is_torus or len(streams) < 2:
        return
    gain = program.total_ns - program.retimed_ns({}, in_flight=2)
    if not program.is_worth(gain):
        return
    first = max(program.collectives, key=lambda each: each.exposed_ns)
    yield program.advice(
        "one-in-flight",
        gain,
        f"collectives over {len(streams)} networks ({', '.join(sorted(streams))}) wait for each "
        "other: XLA:GPU has one in flight at a time",
        program.place(first.op),
        "XLA_FLAGS=--xla_gpu_experimental_parallel_collective_overlap_limit=2",
    )


def _after(program: Program, exposed: Sequence[Collective], steps: str) -> Program | None:
    """Returns the program after a pass, if the collectives that it could hide cost enough."""
    is_worth = program.is_worth(sum(each.exposed_ns for each in exposed))
    return program.after(steps) if is_worth else None


def _gained(
    program: Program,
    after: Program,
    cause_id: str,
    cause: str,
    first: Collective,
    remedy: str,
    steps: str,
    *,
    spares: bool = False,
) -> Iterator[Advice]:
    """Yields the item, if the pass gains enough and the program fits, or needs no more than before.

    The gain is at most the decrease of exposed time or, if the pass `spares` communication, the
    decrease of the collectives' time. The rest is not due to this cause.
    """
    if spares:
        most = sum(each.ns for each in program.collectives) - sum(c.ns for c in after.collectives)
    else:
        most = program.simulation.exposed_ns - after.simulation.exposed_ns
    gain = min(program.total_ns - after.total_ns, most)
    if program.is_worth(gain) and after.peak_bytes <= max(program.capacity, program.peak_bytes):
        place, pipeline = program.place(first.op), program.pipeline(steps)
        yield program.advice(cause_id, gain, cause, place, remedy, pipeline=pipeline)


def _in_loops(program: Program) -> list[Collective]:
    return [each for each in program.collectives if each.path and each.times > 1]


def _counted(each: Sequence[object], what: str) -> str:
    return f"{len(each)} {what}{'s' if len(each) > 1 else ''}"
