"""Plans a layer loop on one microbatch.

A *phase* is a loop over layers as a rank of the pipeline runs it. It states which carries are sent
from rank to rank: the activations, or their cotangents. It also states the rows of stacks that an
iteration reads and writes, and the carries that only accumulate terms. Sums over the batch become
sums over microbatches. Any other op that uses several samples at once is refused by its name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from stablehlo_tools.analysis.dataflow import Body, Node, inputs_of, needed_nodes
from stablehlo_tools.analysis.dimension_propagation.propagation import BatchDims
from stablehlo_tools.analysis.loop_carries import LayerLoop, RowAccess, StackRows
from stablehlo_tools.analysis.partial_sums import PartialSums, source_of
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note
from stablehlo_tools.dialect.kernels.table import describe_unknown
from stablehlo_tools.dialect.names import CUSTOM_CALL
from stablehlo_tools.dialect.reducers import identity_of
from stablehlo_tools.ir.builder import element_of
from stablehlo_tools.ir.values import has_uses, key_of


def mixing_refusal(terms: PartialSums, node: Node) -> ToolError:
    """Returns the refusal that names the op that needs the whole batch, and the sum over samples
    that it uses, if any."""
    source = source_of(terms, node)
    if source is None and node.name == CUSTOM_CALL:
        return ToolError(
            f"expand-pipeline: a kernel cannot run on one microbatch (P4): "
            f"{describe_unknown(node.op)}",
            node.op.location,
        )
    if source is None:
        return ToolError(
            f"expand-pipeline: {node.name} mixes samples of the batch, so it cannot run on one "
            "microbatch (P4): compute statistics of each sample separately, or name another batch "
            "with `arguments` and `dimension`",
            node.op.location,
        )
    return ToolError(
        f"expand-pipeline: {source.name} mixes samples of the batch, and {node.name} needs the "
        "result for the whole batch before the next layer (P4): compute statistics of each sample "
        "separately, let per-microbatch=true compute them for each microbatch, or name another "
        "batch with `arguments` and `dimension`",
        source.op.location,
        (note("the result for the whole batch is needed here", node.op.location),),
    )


_ADDING = frozenset({"stablehlo.add", "sdy.sharding_constraint"})


@dataclass(frozen=True)
class RowRead:
    """A slice op of the body, and the rows that it reads."""

    node: Node
    rows: StackRows
    access: RowAccess


@dataclass(frozen=True)
class RowWrite:
    """An update op of the body, which writes value number `update`, of shape [rows, …], to rows."""

    rows: StackRows
    access: RowAccess
    update: int


@dataclass(frozen=True)
class LayerPhase:
    """A layer loop on one microbatch.

    `flows` are the carries sent from rank to rank. `sums` are those that only accumulate terms, on
    each rank separately. `term_flows` are flows that are terms: for the first microbatch they start
    from the loop's operand, for the others from 0. `reads` and `writes` are the rows of stacks,
    `nodes` the other ops of an iteration. `terms` holds the values that are terms of a sum over the
    microbatches.
    """

    loop: LayerLoop
    terms: PartialSums
    flows: tuple[int, ...]
    sums: tuple[int, ...]
    term_flows: frozenset[int]
    reads: tuple[RowRead, ...]
    writes: tuple[RowWrite, ...]
    nodes: tuple[Node, ...]
    node: Node = field(repr=False)

    @property
    def body(self) -> Body:
        """The body of the loop."""
        return self.node.bodies[1]

    @property
    def dims(self) -> BatchDims:
        """The batch dimension of each value."""
        return self.terms.dims

    def start_of_rows(self, carry: int, element: ir.Type) -> float | int:
        """Returns the initial number in a stacked result; for terms, the identity of their
        reduction."""
        kinds = {
            self.terms.terms[write.update]
            for write in self.writes
            if write.rows.carry == carry and write.update in self.terms.terms
        }
        start = identity_of(kinds.pop(), element) if kinds else 0
        assert start is not None
        return start

    @property
    def written(self) -> tuple[int, ...]:
        """The carries that are stacked results, in order."""
        return tuple(sorted({write.rows.carry for write in self.writes}))


def plan_phase(loop: LayerLoop, dims: BatchDims) -> LayerPhase:
    """Returns the plan of a loop. Raises a located ToolError for an op that mixes samples."""
    node = next(n for n in dims.graph.nodes if n.name == loop.op.name and n.op == loop.op)
    body = node.bodies[1]
    live = _live(loop, body, node)
    terms, sums = _sums(loop, body, dims, live)
    alone = {carry for carry in sums if _only_grows(body, carry)}
    by_op = {key_of(node.op): node for node in body.nodes}
    reads = [
        RowRead(by_op[key_of(access.op)], rows, access)
        for rows in loop.reads.values()
        for access in rows.accesses
    ]
    writes = [
        RowWrite(rows, access, by_op[key_of(access.op)].operands[1])
        for rows in loop.writes.values()
        for access in rows.accesses
        if rows.carry in live
    ]
    for write in writes:
        if write.update in terms.blocked:
            raise mixing_refusal(terms, terms.blocked[write.update])
        # Terms can only be accumulated in a stack if their reduction has an identity.
        kind = terms.terms.get(write.update)
        element = element_of(loop.op.operands[write.rows.carry])
        if kind is not None and identity_of(kind, element) is None:
            raise ToolError(
                f"expand-pipeline: a stack of {element} accumulates the {kind} over the batch, "
                "which has no identity to start from (P6)",
                loop.op.location,
            )
    ends = [body.returned[c] for c in loop.flows if c in live] + [w.update for w in writes]
    # Stop at the rows read: a rank reads them from its own stacks.
    nodes = needed_nodes(body.nodes, ends, {n for read in reads for n in read.node.results})
    used = {number for n in nodes for number in n.inputs} | set(ends)
    return LayerPhase(
        loop,
        terms,
        tuple(c for c in loop.flows if c in live and c not in alone),
        tuple(sorted(alone)),
        frozenset(sums - alone),
        tuple(read for read in reads if read.node.results[0] in used),
        tuple(writes),
        nodes,
        node,
    )


def _only_grows(body: Body, carry: int) -> bool:
    """Returns True if an iteration only adds terms to a carry."""
    makers = {number: node for node in body.nodes for number in node.results}
    uses = Counter(number for node in body.nodes for number in inputs_of(node))
    uses.update(body.returned)
    number, argument = body.returned[carry], body.arguments[carry]
    while number != argument:
        node = makers.get(number)
        # Any other use would read the running total, and each rank has its own.
        if node is None or uses[number] != 1:
            return False
        onward = [n for n in node.operands if _hangs_on(n, argument, makers)]
        if node.name not in _ADDING or len(onward) != 1:
            return False
        number = onward[0]
    return uses[argument] == 1


def _hangs_on(number: int, argument: int, makers: dict[int, Node]) -> bool:
    pending, seen = [number], set[int]()
    while pending:
        each = pending.pop()
        if each == argument:
            return True
        if each not in seen and each in makers:
            seen.add(each)
            pending += inputs_of(makers[each])
    return False


def _sums(
    loop: LayerLoop, body: Body, dims: BatchDims, live: set[int]
) -> tuple[PartialSums, set[int]]:
    """Returns the sums over samples, and the flows that only accumulate terms. Raises ToolError for
    a flow that is neither, and neither a value of samples nor the same for all."""
    sums: set[int] = set()
    flows = [carry for carry in loop.flows if carry in live]
    while True:
        terms = PartialSums(dims)
        # A carry that is a sum makes more values terms: repeat until no carry is added.
        terms.terms.update({body.arguments[carry]: "add" for carry in sums})
        terms.visit(body.nodes)
        mixed = {
            c for c in flows if {body.returned[c]} & (terms.terms.keys() | terms.blocked.keys())
        }
        summed = {c for c in mixed if body.arguments[c] not in dims.tilings}
        if summed <= sums:
            break
        sums |= summed
    for carry in flows:
        end = body.returned[carry]
        if end in terms.blocked:
            raise mixing_refusal(terms, terms.blocked[end])
        if (carry in sums) != (terms.terms.get(end) == "add"):
            culprit = next((n for n in body.nodes if end in n.results), body.nodes[-1])
            raise mixing_refusal(terms, culprit)
    return terms, sums


def _live(loop: LayerLoop, body: Body, node: Node) -> set[int]:
    """Returns the carries that a used result depends on."""
    live = {carry for carry in (*loop.flows, *loop.writes) if has_uses(loop.op.results[carry])}
    place = {number: carry for carry, number in enumerate(body.arguments)}
    while True:
        ends = [body.returned[carry] for carry in live]
        reading = needed_nodes(body.nodes, ends)
        used = {n for each in reading for n in inputs_of(each)} | set(ends)
        reached = live | {place[n] for n in used if n in place and place[n] in loop.flows}
        if reached == live:
            return live
        live = reached
