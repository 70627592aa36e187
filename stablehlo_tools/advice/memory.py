"""Memory: a program that does not fit, and what would make it; weights that are gathered twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stablehlo_tools.advice.collective_uses import argument_behind
from stablehlo_tools.advice.program import Collective, Program
from stablehlo_tools.analysis.entry import argument_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import duration, share, size
from stablehlo_tools.overlap.task_graph import TaskKind
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.report.document import Advice

_MICROBATCHES = (2, 4, 8)


def does_not_fit(program: Program) -> Iterator[Advice]:
    """More memory than the device has: what of the forward is not kept, or else the number of
    microbatches with which it fits."""
    over = program.peak_bytes - program.capacity
    if over <= 0:
        return
    inputs = [task for task in program.graph.tasks if task.kind is TaskKind.INPUT]
    arguments = sum(program.graph.storages[u] for task in inputs for u in task.allocs)
    cause = (
        f"the program needs {size(program.peak_bytes)} of {size(program.capacity)}, "
        f"{size(arguments)} of it for its arguments"
    )
    recomputed = _recomputed(program)
    if recomputed is not None:
        steps, after = recomputed
        slower = after.total_ns - program.total_ns
        yield program.advice(
            "does-not-fit",
            max(0.0, -slower),
            cause,
            program.given.name,
            f"compute again what is not worth keeping for the backward: {size(after.peak_bytes)}, "
            f"which fits, and {duration(abs(slower))} {'more' if slower > 0 else 'less'}",
            pipeline=program.pipeline(steps),
            gain_bytes=program.peak_bytes - after.peak_bytes,
        )
        return
    pipeline, remedy, gained, slower = None, "", 0.0, 0.0
    for count in _MICROBATCHES:
        steps = f"accumulate-gradients{{microbatches={count}}}"
        after = _accumulated(program, steps)
        if after is None or program.peak_bytes - after.peak_bytes <= gained:
            break
        gained, slower = program.peak_bytes - after.peak_bytes, after.total_ns - program.total_ns
        pipeline = program.pipeline(steps, before_partition=True)
        fits = after.peak_bytes <= program.capacity
        remedy = (
            f"{count} microbatches: {size(after.peak_bytes)}, which "
            f"{'fits' if fits else 'does not fit yet'}, and {duration(abs(slower))} "
            f"{'more' if slower > 0 else 'less'}; or "
        )
        if fits:
            break
    remedy += "divide weights and the optimizer's state over more devices (FSDP, ZeRO-1)"
    yield program.advice(
        "does-not-fit",
        max(0.0, -slower),
        cause,
        program.given.name,
        remedy,
        pipeline=pipeline,
        gain_bytes=gained or over,
    )


def _recomputed(program: Program) -> tuple[str, Program] | None:
    """The pass and the program that it makes fit; None where that is not found."""
    steps = f"rematerialize{{hardware={program.clock.hardware.name}}}"
    after = program.after(steps)
    if after is None or after.peak_bytes > program.capacity:
        return None
    return steps, after


def _accumulated(program: Program, steps: str) -> Program | None:
    pipeline = Pipeline.parse(steps)

    def edit(module: ir.Module) -> None:
        copy = program.given.copy()
        copy.module = module
        run_pipeline(copy, pipeline)

    return program.partitioned_after(edit)


def weights_gathered_again(program: Program) -> Iterator[Advice]:
    """Weights gathered for the forward and again for the backward, where keeping them fits."""
    by_argument: dict[tuple[ir.Value, object], list[Collective]] = defaultdict(list)
    for each in program.collectives:
        if each.sent.kind == "all_gather" and len(each.op.operands) == 1:
            argument = argument_behind(each.op.operands[0])
            if argument is not None:
                key = argument, (each.sent.groups, each.sent.bytes * each.times)
                by_argument[key].append(each)
    again = [(key[0], each) for key, every in by_argument.items() for each in every[1:]]
    if not program.is_worth(sum(each.exposed_ns for _, each in again)):
        return
    gain = program.total_ns - program.retimed_ns({(c.path, c.task): 0.0 for _, c in again})
    kept = sum(each.sent.bytes * each.times for _, each in again)
    if not program.is_worth(gain) or program.peak_bytes + kept > program.capacity:
        return
    argument, first = max(again, key=lambda pair: pair[1].ns)
    yield program.advice(
        "gathered-twice",
        gain,
        f"{len(again)} gathers of weights that were gathered before, of {argument_name(argument)} "
        f"first: {duration(sum(each.ns for _, each in again))}",
        program.place(first.op),
        f"keep what the forward gathered: {size(kept)} more, {size(program.peak_bytes + kept)} in "
        f"all, {share(program.peak_bytes + kept, program.capacity)} of the memory (a policy of "
        "jax.checkpoint that saves it, or ZeRO-2); to gather again is right where that is short",
    )
