"""The relation of dimensions, held against what the reference interpreter computes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from dimension_cases import KEPT, OTHERS, Array, Case, op_of, run

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import dimensions_of
from stablehlo_tools.dialect.factors import (
    PASSED_THROUGH,
    Along,
    DimensionLink,
    Factor,
    FactorRole,
    OpDimensions,
)

CONTEXT = bindings.new_context()
SIZE, PART = 11, slice(2, 5)


def relation_of(module: ir.Module) -> OpDimensions:
    """That of the op of a case."""
    relation = dimensions_of(op_of(module))
    assert relation is not None
    return relation


def factor_of_size(relation: OpDimensions, size: int) -> Factor:
    """The only factor of a size."""
    (factor,) = [factor for factor in relation.factors if factor.size == size]
    return factor


def cut(arrays: list[Array], alongs: tuple[Along, ...]) -> list[Array]:
    """A part of arrays along a factor."""
    parts = list(arrays)
    for along in alongs:
        parts[along.tensor] = np.moveaxis(
            np.moveaxis(parts[along.tensor], along.dim, 0)[PART], 0, along.dim
        )
    return parts


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_of_a_part_of_what_is_kept_an_op_makes_that_part(case: Case):
    whole = case.module(SIZE, CONTEXT)
    factor = factor_of_size(relation_of(whole), SIZE)
    assert factor.role is FactorRole.KEPT
    arguments = case.arguments(SIZE)
    part = case.module(PART.stop - PART.start, CONTEXT)
    expected = cut(run(whole, arguments), factor.results)
    for one, other in zip(run(part, cut(arguments, factor.operands)), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def digit(along: Along, size: int, position: int) -> int | None:
    """The position of a factor that an element is, of one that has digits of a dimension."""
    return position // along.step % size


def may_become(link: DimensionLink, position: int, count: int) -> set[int]:
    """The elements of a result's dimension that may depend on one of an operand's."""
    size = link.factor.size
    if link.role in PASSED_THROUGH:
        own = digit(link.operand, size, position)
        return {r for r in range(count) if digit(link.result, size, r) == own}
    taken, put = link.operand.positions(size), link.result.positions(size)
    if link.role is not FactorRole.MOVED or taken is None or put is None:
        return set(range(count))
    return {put[taken.index(position)]} if position in taken else set()


def allowed(relation: OpDimensions, operand: int, dim: int, position: int) -> list[Array]:
    """Masks of the results' elements that may depend on an element along a dimension."""
    masks: list[Array] = []
    for result, shape in enumerate(relation.results):
        mask = np.ones(shape, np.bool_)
        links = [link for link in relation.of_operand(operand, dim) if link.result.tensor == result]
        for along in {link.result.dim for link in links}:
            places = [
                may_become(link, position, shape[along])
                for link in links
                if link.result.dim == along
            ]
            digits = all(link.role in PASSED_THROUGH for link in links)
            either = set.intersection(*places) if digits else set[int]().union(*places)
            outside = [r for r in range(shape[along]) if r not in either]
            np.moveaxis(mask, along, 0)[outside] = False
        masks.append(mask)
    return masks


@pytest.mark.parametrize("case", [*KEPT, *OTHERS], ids=lambda case: case.name)
def test_an_element_changes_only_what_its_links_lead_to(case: Case):
    module = case.module(4, CONTEXT)
    relation = relation_of(module)
    arguments = case.arguments(4)
    before = run(module, arguments)
    changes = 0
    for operand, shape in enumerate(relation.operands):
        if arguments[operand].dtype != np.float32:
            continue  # indices: where they lead is not asked
        for dim, size in enumerate(shape):
            for position in range(size):
                changed = list(arguments)
                changed[operand] = arguments[operand].copy()
                np.moveaxis(changed[operand], dim, 0)[position] += 8.5
                masks = allowed(relation, operand, dim, position)
                for one, other, mask in zip(before, run(module, changed), masks, strict=True):
                    differs = one != other
                    assert not (differs & ~mask).any(), (operand, dim, position)
                    changes += int(differs.any())
    assert changes or not any(a.dtype == np.float32 and a.ndim for a in arguments)


@pytest.mark.parametrize("case", [*KEPT, *OTHERS], ids=lambda case: case.name)
def test_results_are_alike_along_what_is_repeated(case: Case):
    module = case.module(4, CONTEXT)
    relation = relation_of(module)
    results = run(module, case.arguments(4))
    for factor in relation.factors:
        if factor.role is not FactorRole.REPEATED:
            continue
        for along in factor.results:
            rows = np.moveaxis(results[along.tensor], along.dim, 0)
            assert (rows == rows[:1]).all()


@pytest.mark.parametrize("case", [*KEPT, *OTHERS], ids=lambda case: case.name)
def test_each_link_is_seen_from_both_ends(case: Case):
    relation = relation_of(case.module(4, CONTEXT))
    forwards = {
        link
        for operand, shape in enumerate(relation.operands)
        for dim in range(len(shape))
        for link in relation.of_operand(operand, dim)
    }
    backwards = {
        link
        for result, shape in enumerate(relation.results)
        for dim in range(len(shape))
        for link in relation.of_result(result, dim)
    }
    assert forwards == backwards
    joined = {
        (one, other) for f in relation.factors for one, other in product(f.operands, f.results)
    }
    assert {(link.operand, link.result) for link in forwards} == joined
