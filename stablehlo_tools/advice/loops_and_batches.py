"""Detects what a pass would gain by running it: collectives of loops, and the batch in parts.

A pass runs on a copy of the program with explicit collectives, if what it improves is there and
costs enough. Both programs are then timed in a compiler's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stablehlo_tools.advice.advised_program import AdvisedProgram, CollectiveCost
from stablehlo_tools.advice.collective_uses import added_up
from stablehlo_tools.diagnostics import duration
from stablehlo_tools.overlap.bounds import could_go_ahead, independence
from stablehlo_tools.overlap.collective_times import graphs_of, loop_compute
from stablehlo_tools.report.document import Advice
from stablehlo_tools.report.schedule_table import count_text

_HIDEABLE = 0.9  # least share of a collective's time that compute can hide


def reductions_in_every_iteration(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects reductions in a loop that sums them: gradients reduced for each microbatch."""
    reduced = [
        each for each in _in_loops(program) if added_up(each.op) and not program.is_sunk(each)
    ]
    steps = "pipeline-collectives{direction=sink}"
    tried = _run_pass(program, reduced, steps, spares=True)
    if tried is None:
        return
    _, gain = tried
    first = max(reduced, key=lambda each: each.ns)
    yield program.advice(
        "reduced-in-every-iteration",
        gain,
        f"{count_text(len(reduced), 'reduction')} in a loop that only accumulates their results: "
        f"{first.times} times a step, {duration(sum(each.ns for each in reduced))} together",
        program.place(first.op),
        "accumulate on each device, and reduce the sum once after the loop",
        pipeline=program.pipeline(steps),
    )


def repeated_for_microbatches(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects collectives of a layer loop that each microbatch repeats: mainly of weights."""
    repeated = [each for each in _in_loops(program) if len(each.path) > 1]
    steps = "pipeline-collectives{direction=once}"
    tried = _run_pass(program, repeated, steps, spares=True)
    if tried is None:
        return
    after, gain = tried
    left = {str(each.op.location) for each in after.collectives if len(each.path) > 1}
    gone = [each for each in repeated if str(each.op.location) not in left] or repeated
    first = max(gone, key=lambda each: each.ns)
    yield program.advice(
        "repeated-for-microbatches",
        gain,
        f"{count_text(len(gone), 'collective')} of layers, repeated for each microbatch: "
        f"{duration(sum(each.ns for each in gone))} together",
        program.place(first.op),
        "gather the weights of all layers once before the loop over microbatches, and reduce the "
        "gradients once after it",
        pipeline=program.pipeline(steps),
    )


def gathers_to_prefetch(program: AdvisedProgram) -> Iterator[Advice]:
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
    tried = _run_pass(program, waited, steps)
    if tried is None:
        return
    _, gain = tried
    first = max(waited, key=lambda each: each.exposed_ns)
    yield program.advice(
        "gather-not-hidden",
        gain,
        f"{count_text(len(waited), 'collective')} in a loop where each iteration waits for them, "
        f"{duration(sum(each.exposed_ns for each in waited))} in all, though the iteration before "
        "could issue them",
        program.place(first.op),
        "issue them one iteration ahead",
        pipeline=program.pipeline(steps),
    )


def batch_to_split(program: AdvisedProgram) -> Iterator[Advice]:
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
    tried = _run_pass(program, stuck, steps)
    if tried is None:
        return
    _, gain = tried
    first = max(stuck, key=lambda each: each.exposed_ns)
    yield program.advice(
        "batch-in-one-part",
        gain,
        f"{count_text(len(stuck), 'collective')} with too little independent compute to hide "
        f"them: {duration(sum(each.exposed_ns for each in stuck))} exposed",
        program.place(first.op),
        "split the batch of each device in two: one part computes while the other communicates",
        pipeline=program.pipeline(steps),
    )


def streams_in_flight(program: AdvisedProgram) -> Iterator[Advice]:
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


def _run_pass(
    program: AdvisedProgram, found: Sequence[CollectiveCost], steps: str, *, spares: bool = False
) -> tuple[AdvisedProgram, float] | None:
    """Returns the program after a pass and the gain, if the collectives found cost enough.

    None if the pass gains too little, or needs more memory than before and than the device has. The
    gain is at most the decrease of exposed time or, if the pass `spares` communication, the
    decrease of the collectives' time. The rest is not due to this cause.
    """
    is_worth = program.is_worth(sum(each.exposed_ns for each in found))
    after = program.after(steps) if is_worth else None
    if after is None:
        return None
    if spares:
        most = sum(each.ns for each in program.collectives) - sum(c.ns for c in after.collectives)
    else:
        most = program.simulation.exposed_ns - after.simulation.exposed_ns
    gain = min(program.total_ns - after.total_ns, most)
    fits = after.peak_bytes <= max(program.capacity, program.peak_bytes)
    return (after, gain) if program.is_worth(gain) and fits else None


def _in_loops(program: AdvisedProgram) -> list[CollectiveCost]:
    return [each for each in program.collectives if each.path and each.times > 1]
