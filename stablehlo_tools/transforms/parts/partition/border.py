"""What `main` looks like from outside, and how its arguments and results are divided."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.analysis.shardings import sharding_per_value
from stablehlo_tools.analysis.tensor_shardings import (
    SHARDING,
    Dims,
    ValueShardings,
    function_sharding,
    rank_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics
from stablehlo_tools.ir.builder import Builder, shape_of
from stablehlo_tools.ir.carriers import append_to_terminator, drop_from_terminator
from stablehlo_tools.ir.inline import wrap_body
from stablehlo_tools.ir.walk import terminator
from stablehlo_tools.transforms.parts.partition.unreduced import UnreducedBorder


@dataclass(frozen=True)
class Signature:
    """What `main` looks like from outside, to be given back after partitioning."""

    arguments: list[ir.Type]
    results: list[ir.Type]
    attributes: dict[str, ir.Attribute]

    @staticmethod
    def of(main: ir.Operation) -> Signature:
        """The signature of a function."""
        block = main.regions[0].blocks[0]
        return Signature(
            [argument.type for argument in block.arguments],
            [value.type for value in terminator(block).operands],
            dict(main.attributes.items()),
        )

    def wrap(self, main: ir.Operation, border: Border, axes: list[str]) -> None:
        """Puts the local body into one manual computation, and the signature back around it."""
        block, results, shardings = main.regions[0].blocks[0], list(self.results), border.results
        if border.witness is not None:
            build = Builder(ir.InsertionPoint(terminator(block)), main.location)
            witness = build.splat(0, [], ir.IntegerType.get_signless(32, main.context))
            append_to_terminator(block, [witness])
            results.append(witness.type)
            each = [*sharding_per_value(shardings), border.witness]
            shardings = bindings.TensorShardingPerValueAttr.get(each, main.context)
        wrap_body(main, border.arguments, shardings, axes, (self.arguments, results))
        if border.witness is not None:
            drop_from_terminator(block, 1)
        for name in ("arg_attrs", "res_attrs"):
            if name in main.attributes:
                del main.attributes[name]
        for name, attribute in self.attributes.items():
            main.attributes[name] = attribute


@dataclass(frozen=True)
class Border:
    """The shardings of a function's arguments and results, as a manual computation lists them.

    `witness`: that of one more result, a number that nobody uses. XLA lets no op take parts of a
    sum that does not give parts of one along the same axes (sdy-verify-unreduced-axes).
    """

    arguments: ir.Attribute
    results: ir.Attribute
    witness: ir.Attribute | None

    @staticmethod
    def of(main: ir.Operation, shardings: ValueShardings, unreduced: UnreducedBorder) -> Border:
        """How Shardy divided them, and what of them is in parts of a sum."""
        sides: list[ir.Attribute] = []
        for name, parts in (("arg_attrs", unreduced.arguments), ("res_attrs", unreduced.results)):
            listed = [
                shardings.attribute(
                    _at_border(main, name, number, value, shardings),
                    main.context,
                    parts[number].axes,
                    parts[number].reduction,
                )
                for number, value in enumerate(_values(main, name))
            ]
            sides.append(bindings.TensorShardingPerValueAttr.get(listed, main.context))
        axes = shardings.axes.canonical(
            dict.fromkeys(axis for parts in unreduced.arguments for axis in parts.axes)
        )
        witness = shardings.attribute((), main.context, axes) if axes else None
        return Border(sides[0], sides[1], witness)


def warn_of_uneven(main: ir.Operation, shardings: ValueShardings, diagnostics: Diagnostics) -> None:
    """Says which arguments and results the program wants divided as they do not divide."""
    for name, what in (("arg_attrs", "argument"), ("res_attrs", "result")):
        for number, value in enumerate(_values(main, name)):
            stated = _at_border(main, name, number, value, shardings)
            for dim, axes in enumerate(stated):
                size, parts = shape_of(value)[dim], shardings.axes.size(axes)
                if size % parts:
                    kept = shardings.axes.size(shardings.even(size, axes))
                    diagnostics.warn(
                        f"{what} {number} of @main has a dimension of {size} that is divided by "
                        f"{parts}, which leaves uneven parts: it is "
                        + (f"divided by {kept}" if kept > 1 else "whole on each device")
                        + " instead, as XLA keeps it",
                        main.location,
                    )


def make_border_even(main: ir.Operation, shardings: ValueShardings) -> None:
    """Takes axes, or parts of them, from dimensions of arguments and results that they do not
    divide evenly."""
    for name in ("arg_attrs", "res_attrs"):
        if name not in main.attributes:
            continue
        lists = [dict_of(each) for each in ir.ArrayAttr(main.attributes[name])]
        for number, value in enumerate(_values(main, name)):
            stated = _at_border(main, name, number, value, shardings)
            even = shardings.even_dims(value, stated)
            if even != stated:
                lists[number][SHARDING] = shardings.attribute(even, main.context)
        main.attributes[name] = ir.ArrayAttr.get(
            [ir.DictAttr.get(each, main.context) for each in lists], main.context
        )


def dict_of(attribute: ir.Attribute) -> dict[str, ir.Attribute]:
    """The entries of a dictionary attribute."""
    return {entry.name: entry.attr for entry in ir.DictAttr(attribute)}


def _values(main: ir.Operation, name: str) -> list[ir.Value]:
    block = main.regions[0].blocks[0]
    return list(block.arguments if name == "arg_attrs" else terminator(block).operands)


def _at_border(
    main: ir.Operation, name: str, number: int, value: ir.Value, shardings: ValueShardings
) -> Dims:
    attribute = function_sharding(main, name, number)
    return ((),) * rank_of(value) if attribute is None else shardings.read(attribute)
