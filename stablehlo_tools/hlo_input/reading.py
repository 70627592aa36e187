"""HLO text to a module of StableHLO: converted in a child, legalized here."""

from __future__ import annotations

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Place, ToolError, from_mlir_error
from stablehlo_tools.hlo_input.converter import to_stablehlo
from stablehlo_tools.hlo_input.legalization import legalize
from stablehlo_tools.hlo_input.marks import mark_of
from stablehlo_tools.hlo_input.text import HloText


def read_hlo(data: bytes, name: str, context: ir.Context) -> tuple[ir.Module, HloText]:
    """The module, and the text that it was. Raises a ToolError at the line that is not taken."""
    try:
        source = HloText(data.decode(), name)
    except UnicodeDecodeError as error:
        raise ToolError(f"not text: byte {error.start} is not UTF-8") from None
    try:
        module = bindings.parse_module(to_stablehlo(source), context)
        legalize(module, source)
        module.operation.verify()
    except ir.MLIRError as error:
        raise _invalid(error, source) from None
    return module, source


def _invalid(error: ir.MLIRError, source: HloText) -> ToolError:
    """What MLIR says of an instruction, at its line: XLA's parser does not check all shapes."""
    told = from_mlir_error(error, "this HLO is no valid StableHLO: ").diagnostic
    mark = mark_of(told.place.name)[1]
    place = told.place if mark is None else Place(None, source.place_of(*mark)[1], 1)
    return ToolError(told.message, place)
