"""A forward loop, the backward loop that reads what it leaves, and what stands between them.

Between the two loops stand the *head* and the loss. The ops that depend on the last activations are
of two kinds. Those that run on samples, and the sums over them, can run on each microbatch, between
its forward and its backward. All others need the whole batch: they wait until the pipeline is
through. The backward loop may need none of those.
"""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.dataflow import Body, Node, inputs_of, needed
from stablehlo_tools.analysis.partial_sums import PartialSums, source_of
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.ir.values import has_uses
from stablehlo_tools.transforms.parts.expand_pipeline.layer_phase import Phase


@dataclass(frozen=True)
class Head:
    """The ops between a forward and a backward loop.

    `nodes` run on each microbatch; `starts` are the values by which they hand the backward loop its
    carries, by carry; `sums` are terms that the rest of the program needs added up, `finals` values
    of samples that it needs of the whole batch. `flows` are the carries of the forward loop that
    the head reads, `whole_flows` those that the rest of the program needs of the whole batch.
    `residuals` are the stacks that the backward loop reads and the forward loop writes, carry by
    carry. `gone` are all ops that have no place any more, `late` those in front of the backward
    loop that wait for the whole pipeline, in order.
    """

    nodes: tuple[Node, ...]
    gone: tuple[Node, ...]
    late: tuple[Node, ...]
    flows: tuple[int, ...]
    whole_flows: tuple[int, ...]
    starts: dict[int, int]
    residuals: dict[int, int]
    sums: tuple[int, ...]
    finals: tuple[int, ...]


@dataclass(frozen=True)
class Training:
    """A forward loop, the backward loop that reads what it leaves, and what stands between."""

    forward: Phase
    backward: Phase
    head: Head


def plan_head(body: Body, forward: Phase, backward: Phase) -> Head:
    """The head between two loops of a block. Raises a located ToolError where the backward loop
    needs something of the whole batch."""
    hanging = _hanging(body, forward.node, backward.node)
    terms = PartialSums(forward.dims)
    terms.visit(hanging)
    residuals = _residuals(forward, backward, hanging)
    _check_taken(forward, backward, hanging, residuals)
    run = _on_samples(terms, forward, hanging)
    starts = _starts(terms, run, hanging, forward, backward)
    gone = tuple(node for node in hanging if node in run)
    made = {number: node for node in gone for number in node.results}
    outside = _used_outside(body, run, {forward.node, backward.node})
    wanted = [n for n in made if n in outside]
    wanted_by_loop = [n for n in starts.values() if n in made]
    nodes = needed(gone, [*wanted, *wanted_by_loop])
    read = {n for node in nodes for n in inputs_of(node)} | set(starts.values())
    place = {number: carry for carry, number in enumerate(forward.node.results)}
    flows = tuple(sorted(place[n] for n in read if n in place and place[n] in forward.flows))
    order = {node: i for i, node in enumerate(body.nodes)}
    return Head(
        nodes,
        gone,
        tuple(n for n in hanging if n not in run and order[n] < order[backward.node]),
        flows,
        tuple(c for c in forward.flows if forward.node.results[c] in outside),
        starts,
        residuals,
        tuple(n for n in wanted if n in terms.terms),
        tuple(n for n in wanted if n not in terms.terms),
    )


def _hanging(body: Body, forward: Node, backward: Node) -> list[Node]:
    """The ops that depend on the forward loop and not on the backward one."""
    reached, excluded = set(forward.results), set(backward.results)
    hanging: list[Node] = []
    for node in body.nodes:
        if node in (forward, backward):
            continue
        used = inputs_of(node)
        if not excluded.isdisjoint(used):
            excluded.update(node.results)
        elif not reached.isdisjoint(used):
            reached.update(node.results)
            hanging.append(node)
    return hanging


def _residuals(forward: Phase, backward: Phase, hanging: list[Node]) -> dict[int, int]:
    """The carries by which the backward loop reads stacks that the forward loop writes, and the
    carries that it writes them by."""
    written = {
        number: carry
        for carry, number in enumerate(forward.node.results)
        if carry in forward.loop.writes
    }
    reads = {read.rows.carry: read.rows for read in backward.reads}
    residuals: dict[int, int] = {}
    hang = {number for node in hanging for number in node.results}
    for carry, rows in reads.items():
        number = backward.node.operands[carry]
        if number in hang:
            maker = next(node for node in hanging if number in node.results)
            raise _not_separable(maker, backward, "rewrites what the forward loop leaves for")
        if number not in written:
            continue
        source = forward.loop.writes[written[number]]
        if (source.first, source.span) != (rows.first, rows.span):
            raise _not_separable(forward.node, backward, "leaves other rows than are read by")
        residuals[carry] = written[number]
    return residuals


def _check_taken(
    forward: Phase, backward: Phase, hanging: list[Node], residuals: dict[int, int]
) -> None:
    """That the backward loop takes nothing of the forward loop and the head but residuals, each for
    itself alone, and the flows that it starts from."""
    given = {number for node in (forward.node, *hanging) for number in node.results}
    taken = {n for each in backward.body.nodes for n in inputs_of(each)}
    for carry, number in enumerate(backward.node.operands):
        if carry not in residuals and carry not in backward.flows:
            taken.add(number)
    if not given.isdisjoint(taken):
        what = "takes what the forward loop or the head gives for all samples in"
        raise _not_separable(backward.node, backward, what)
    for source in residuals.values():
        users = [use.owner.operation for use in forward.loop.op.results[source].uses]
        if any(op != backward.loop.op for op in users):
            raise _not_separable(forward.node, backward, "leaves a stack that is used outside of")
        if any(
            write.update in forward.terms.terms
            for write in forward.writes
            if write.rows.carry == source
        ):
            raise _not_separable(forward.node, backward, "leaves a sum over the whole batch for")


def _activations(forward: Phase) -> set[int]:
    """The flows behind the last layer that are of samples."""
    flows = {forward.node.results[carry] for carry in forward.flows}
    return flows & forward.dims.tilings.keys()


def _on_samples(terms: PartialSums, forward: Phase, hanging: list[Node]) -> set[Node]:
    """The ops that can run on one microbatch: they give samples, or sums over them, and take
    nothing of the whole batch."""
    on_samples: set[Node] = set()
    late = set(forward.node.results) - _activations(forward)
    for node in hanging:
        if late.isdisjoint(inputs_of(node)) and _runs_on_samples(terms, node):
            on_samples.add(node)
        else:
            late.update(node.results)
    return on_samples


def _runs_on_samples(terms: PartialSums, node: Node) -> bool:
    dims = terms.dims
    if not any(number in dims.tilings for number in inputs_of(node)):
        return False
    used = [number for number in node.results if has_uses(dims.graph.values[number])]
    return bool(used) and all(
        number not in terms.blocked and (number in dims.tilings or terms.terms.get(number) == "add")
        for number in used
    )


def _starts(
    terms: PartialSums,
    run: set[Node],
    hanging: list[Node],
    forward: Phase,
    backward: Phase,
) -> dict[int, int]:
    """What the backward loop starts from, where that hangs on the forward loop."""
    passed = _activations(forward)
    given = set(forward.node.results)
    made = {number: node for node in hanging for number in node.results}
    starts: dict[int, int] = {}
    for carry in backward.flows:
        number = backward.node.operands[carry]
        node = made.get(number)
        if node is None and number in given - passed:
            raise _whole(terms, forward.node, number, backward)
        if node is not None and (node not in run or number in terms.terms):
            raise _whole(terms, node, number, backward)
        if node is not None or number in passed:
            starts[carry] = number
    return starts


def _whole(terms: PartialSums, node: Node, number: int, backward: Phase) -> ToolError:
    blocked = terms.blocked.get(number, node)
    source = source_of(terms, blocked) or blocked
    return ToolError(
        f"expand-pipeline: {source.name} takes all samples of the batch, and the backward loop "
        "needs what follows from it: the loss is not a sum over microbatches, so that no backward "
        "can begin before all forwards are done (P7); schedule=gpipe and schedule=circular can",
        source.op.location,
        (note("the backward loop", backward.loop.op.location),),
    )


def _not_separable(node: Node, backward: Phase, what: str) -> ToolError:
    return ToolError(
        f"expand-pipeline: {node.name} {what} the backward loop, so that the two cannot take turns "
        "(P7); schedule=gpipe and schedule=circular can",
        node.op.location,
        (note("the backward loop", backward.loop.op.location),),
    )


def _used_outside(body: Body, run: set[Node], loops: set[Node]) -> set[int]:
    """The values that ops outside of the pipeline use."""
    used: set[int] = set()
    for node in body.nodes:
        if node not in run and node not in loops:
            used |= inputs_of(node)
    return used | set(body.returned)
