"""What `main` looks like from outside, and how its arguments and results are divided."""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.tensor_shardings import (
    Dims,
    ValueShardings,
    function_sharding,
    rank_of,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.manual import wrap_body


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
        wrap_body(main, border.arguments, border.results, axes, (self.arguments, self.results))
        for name in ("arg_attrs", "res_attrs"):
            if name in main.attributes:
                del main.attributes[name]
        for name, attribute in self.attributes.items():
            main.attributes[name] = attribute


@dataclass(frozen=True)
class Border:
    """The shardings of a function's arguments and results, as a manual computation lists them."""

    arguments: ir.Attribute
    results: ir.Attribute

    @staticmethod
    def of(main: ir.Operation, shardings: ValueShardings) -> Border:
        """How Shardy divided them. Raises a ToolError where one does not divide (P6)."""
        block = main.regions[0].blocks[0]
        sides: list[ir.Attribute] = []
        for kind, values in (
            ("arg_attrs", list(block.arguments)),
            ("res_attrs", list(terminator(block).operands)),
        ):
            found = [_at_border(main, kind, n, v, shardings) for n, v in enumerate(values)]
            sides.append(shardings.per_value(found, main.context))
        return Border(*sides)


def _at_border(
    main: ir.Operation, kind: str, number: int, value: ir.Value, shardings: ValueShardings
) -> Dims:
    attribute = function_sharding(main, kind, number)
    dims = ((),) * rank_of(value)
    if attribute is not None:
        dims = shardings.read(attribute)
        shardings.check_reduced(attribute, main.location)
    shape = ir.RankedTensorType(value.type).shape
    for size, axes in zip(shape, dims, strict=True):
        parts = shardings.axes.size(axes)
        if size % parts:
            what = "argument" if kind == "arg_attrs" else "result"
            raise ToolError(
                f"{what} {number} of @main has a dimension of {size} that is divided by {parts}: "
                "partition needs equal parts (P6)",
                main.location,
            )
    return dims
