"""Detects programs that do not fit, residuals to keep or recompute, and weights gathered twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from stablehlo_tools.advice.advised_program import AdvisedProgram, CollectiveCost
from stablehlo_tools.advice.collective_uses import argument_behind
from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.entry import argument_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import duration, share, size
from stablehlo_tools.ir.walk import functions_by_name
from stablehlo_tools.overlap.task_graph import TaskKind
from stablehlo_tools.passes.pipeline import Pipeline, run_pipeline
from stablehlo_tools.report.document import Advice
from stablehlo_tools.transforms.parts.rematerialize.passages import blocks_of, kept_rows

_MICROBATCHES = (2, 4, 8)


def does_not_fit(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects a program that needs more memory than the device has.

    The remedy recomputes some residuals, or runs the fewest microbatches that fit.
    """
    over = program.peak_bytes - program.capacity
    if over <= 0:
        return
    inputs = [task for task in program.graph.tasks if task.kind is TaskKind.INPUT]
    arguments = sum(program.graph.storages[u] for task in inputs for u in task.allocs)
    cause = (
        f"the program needs {size(program.peak_bytes)} and the device has "
        f"{size(program.capacity)}; its arguments need {size(arguments)}"
    )
    ways = [
        way
        for way in (_with_rematerialization(program), _with_fewer_samples(program))
        if way is not None
    ]
    fitting = sorted((w for w in ways if w.fits(program)), key=lambda way: way.after.total_ns)
    best = next(iter(fitting or ways), None)
    remedy = ""
    if best is not None:
        remedy = (
            f"{best.does}: {size(best.after.peak_bytes)}, which "
            f"{'fits' if fitting else 'does not fit yet'}, and {_longer(best.after, program)}"
        )
        remedy += "".join(
            f" ({other.does} would also fit: {_longer(other.after, best.after)})"
            for other in fitting[1:]
        )
    if best is None or best.divides:
        remedy += "; or " if remedy else ""
        remedy += "divide weights and the optimizer's state over more devices (FSDP, ZeRO-1)"
    slower = 0.0 if best is None else best.after.total_ns - program.total_ns
    yield program.advice(
        "does-not-fit",
        max(0.0, -slower),
        cause,
        program.given.name,
        remedy,
        pipeline=best and program.pipeline(best.steps, before_partition=best.divides),
        gain_bytes=program.peak_bytes - best.after.peak_bytes if best else over,
    )


@dataclass(frozen=True)
class _MemoryRemedy:
    """A way to need less memory: in words, as passes, and the program after them.

    `divides`: it divides the batch, so that its passes must run before a partitioner.
    """

    does: str
    steps: str
    after: AdvisedProgram
    divides: bool = False

    def fits(self, program: AdvisedProgram) -> bool:
        """Returns True if it needs no more memory than the device has."""
        return self.after.peak_bytes <= program.capacity


def _longer(after: AdvisedProgram, before: AdvisedProgram) -> str:
    slower = after.total_ns - before.total_ns
    return f"{duration(abs(slower))} {'more' if slower > 0 else 'less'}"


def _with_fewer_samples(program: AdvisedProgram) -> _MemoryRemedy | None:
    """Returns the fewest microbatches that fit, or those that need least memory.

    None if the batch cannot be divided, or if dividing it needs no less memory.
    """
    best: _MemoryRemedy | None = None
    for count in _MICROBATCHES:
        steps = f"accumulate-gradients{{microbatches={count}}}"
        after = _run_before_partition(program, steps)
        least = program.peak_bytes if best is None else best.after.peak_bytes
        if after is None or after.peak_bytes >= least:
            break
        best = _MemoryRemedy(f"{count} microbatches", steps, after, divides=True)
        if best.fits(program):
            break
    return best


def _with_rematerialization(program: AdvisedProgram) -> _MemoryRemedy | None:
    """Returns the program that recomputes residuals not worth their memory; None if too large."""
    steps = f"rematerialize{{hardware={program.clock.hardware.name}}}"
    after = program.after(steps)
    if after is None or after.peak_bytes > program.capacity:
        return None
    return _MemoryRemedy(
        "recompute residuals that are not worth their memory in the backward", steps, after
    )


def kept_for_the_backward(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects a choice of residuals that is not the fastest, in a program that fits.

    jax.checkpoint recomputes values that could be kept, or keeps values that are quicker to
    recompute.
    """
    if program.peak_bytes > program.capacity:
        return  # does_not_fit's case
    module = program.explicit.module
    effects = Effects(functions_by_name(module))
    kept = (rows for block in blocks_of(module) for rows in kept_rows(block, effects))
    if not any(reader.takes_last_first for rows in kept for reader in rows.readers):
        return  # no loop reads rows of another one backwards
    now = program.as_advised
    way = _with_rematerialization(now)
    if way is None:
        return
    after = way.after
    gain = now.total_ns - after.total_ns
    if not program.is_worth(gain):
        return
    loops = [task for task in program.graph.tasks if task.loop is not None]
    longest = max(loops, key=lambda task: task.ns)
    is_more = after.peak_bytes > now.peak_bytes
    does = (
        "recomputes residuals that would fit"
        if is_more
        else "keeps residuals that are faster to recompute"
    )
    yield program.advice(
        "kept-for-backward",
        gain,
        f"the backward {does}: the program needs {size(program.peak_bytes)} of "
        f"{size(program.capacity)}",
        program.place(program.traced.ops[longest.id][-1]),
        f"choose the residuals again: {size(after.peak_bytes)} (rematerialize's `explain` lists "
        "them, as a policy of jax.checkpoint)",
        pipeline=program.pipeline(way.steps),
    )


def _run_before_partition(program: AdvisedProgram, steps: str) -> AdvisedProgram | None:
    pipeline = Pipeline.parse(steps)

    def edit(module: ir.Module) -> None:
        copy = program.given.copy()
        copy.module = module
        run_pipeline(copy, pipeline)

    return program.partitioned_after(edit)


def weights_gathered_again(program: AdvisedProgram) -> Iterator[Advice]:
    """Detects weights gathered for the forward and again for the backward, if keeping them fits."""
    by_argument: dict[tuple[ir.Value, object], list[CollectiveCost]] = defaultdict(list)
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
        f"{len(again)} gathers of weights that the forward gathered already, first of "
        f"{argument_name(argument)}: {duration(sum(each.ns for _, each in again))}",
        program.place(first.op),
        f"keep the gathered weights of the forward: {size(kept)} more, "
        f"{size(program.peak_bytes + kept)} in all, "
        f"{share(program.peak_bytes + kept, program.capacity)} of the memory (a policy of "
        "jax.checkpoint that saves them, or ZeRO-2); gathering again is right if memory is short",
    )
