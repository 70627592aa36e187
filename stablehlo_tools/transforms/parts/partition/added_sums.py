"""Adds values in parts of a sum over devices before that sum: one collective for several.

    %a = sdy.all_reduce {"data"} %x            %xy = stablehlo.add %x, %y
    %b = sdy.all_reduce {"data"} %y     ==>    %c = sdy.all_reduce {"data"} %xy
    %c = stablehlo.add %a, %b

The gradients of two gathers of one table are such terms. They may be resharded before they are
added, all in the same way, and other terms may be among them. No product or loop may run between
the terms, because the parts, which have the size of the whole value, would stay in memory for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from stablehlo_tools.analysis.shardings import SHARDING, ValueShardings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, REDUCE, RESHARD, SCATTER
from stablehlo_tools.dialect.reducers import reducer_kind
from stablehlo_tools.dialect.traits import BRANCHES, Trait, ops_with_any
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.values import in_block_order, is_used_once, maker_of, producer
from stablehlo_tools.ir.views import Combining
from stablehlo_tools.ir.walk import ops_where
from stablehlo_tools.transforms.parts.partition.dividing import ALL_REDUCE

_HEAVY = ops_with_any(Trait.CONTRACTION | Trait.LOOP | Trait.OPAQUE) | BRANCHES
_PASSED = frozenset({RESHARD, ALL_REDUCE})


def terms_of_sums(main: ir.Operation) -> Iterator[list[ir.Value]]:
    """Yields the terms of each sum that only it uses, and between which no heavy op runs.

    A sum is a tree of adds in one block.
    """
    ops = ops_where(main, lambda _: True)
    # The number of heavy ops up to each op.
    heavy = dict(zip(ops, accumulate(op.name in _HEAVY for op in ops), strict=True))
    inner = set[ir.Operation]()
    for add in [op for op in reversed(ops) if op.name == ADD]:
        pending, makers = [] if add in inner else list(add.operands), dict[ir.Operation, ir.Value]()
        while pending:
            value = pending.pop()
            maker = producer(value)
            if maker is None or maker.block != add.block or not is_used_once(value):
                continue
            if maker.name == ADD:
                inner.add(maker)
                pending += maker.operands
            elif (source := _source(maker)) is not None:
                makers[source] = value
        passed = heavy[add]  # the heavy ops up to the place where the terms begin
        near = list[ir.Value]()
        for maker in sorted(makers, key=lambda op: (-heavy[op], op.name in _HEAVY)):
            if heavy[maker] != passed:
                break
            near.append(makers[maker])
            passed -= maker.name in _HEAVY
        if len(near) > 1:
            yield near


def _source(op: ir.Operation) -> ir.Operation | None:
    """Returns the op that makes the parts of a term; None if something else uses them, or if the
    all_reduce does not add them."""
    maker: ir.Operation | None = op
    while maker is not None and maker.name in _PASSED:
        value = maker.operands[0]
        maker = producer(value) if is_used_once(value) else None
    if maker is None or maker.block != op.block:
        return None
    reduces = maker.name in (REDUCE, SCATTER)
    return None if reduces and reducer_kind(Combining(maker).combiner) != "add" else maker


def add_before_sums(main: ir.Operation, shardings: ValueShardings) -> None:
    """Adds the parts of terms with the same all_reduce and reshards, and reduces the sum once."""
    for terms in list(terms_of_sums(main)):
        alike: dict[tuple[object, ...], dict[ir.Operation, ir.Value]] = {}
        for term in terms:
            op = maker_of(term)
            while op.name == RESHARD:
                op = maker_of(op.operands[0])
            if op.name == ALL_REDUCE:
                dims = map(shardings.axes_by_dim, (op.operands[0], term))
                alike.setdefault((str(op.attributes["reduction_axes"]), *dims), {})[op] = term
        for group in alike.values():
            *others, last = in_block_order(list(group))
            for other in others:
                build = Builder(ir.InsertionPoint(last), last.location)
                parts = build.same("add", other.operands[0], last.operands[0])
                maker_of(parts).attributes[SHARDING] = shardings.per_value(
                    [shardings.axes_by_dim(last.operands[0])], last.context
                )
                last.operands[0] = parts
                _drop_term(group[other], other)


def _drop_term(term: ir.Value, reduction: ir.Operation) -> None:
    """Erases a term, down to its all_reduce, and the add that uses it."""
    (add,) = (use.owner.operation for use in term.uses)
    (rest,) = (value for value in add.operands if value != term)
    add.results[0].replace_all_uses_with(rest)
    add.erase()
    while (op := maker_of(term)) != reduction:
        term = op.operands[0]
        op.erase()
    reduction.erase()
