"""Costs in a JSON file: one object, each figure a number or a list with one for every slice.

    {"forward": [1, 1, 2, 1], "input_gradient": 1, "weight_gradient": 1, "communication": 0.1}

The keys are the fields of `Costs`; the three phases have to be there. The slices are equal parts of
the model in order; numbers without a list are of as many slices as there are ranks.
"""

from __future__ import annotations

from typing import Any, cast

from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.atomic import STDIN
from stablehlo_tools.files.json_text import read_json
from stablehlo_tools.schedules.costs import Costs, costs

_NEEDED = ("forward", "input_gradient", "weight_gradient")
_PER_SLICE = (*_NEEDED, "backward", "activation", "kept", "weights")
_SCALARS = ("communication", "overlapped", "message")


def read_costs(path: str, ranks: int, slices: int) -> Costs:
    """The costs in a file, of `slices` slices where it has no lists.

    Raises ToolError, with its name, for what is not in this form.
    """
    with naming("<stdin>" if path == STDIN else path):
        return to_costs(read_json(path), ranks, slices)


def to_costs(content: Any, ranks: int, slices: int) -> Costs:
    """The costs in parsed JSON; numbers without a list are of one rank's share of the model.

    Raises ToolError naming the key.
    """
    if not isinstance(content, dict):
        raise ToolError(f"costs are an object with the keys {', '.join(_NEEDED)} at least")
    given = cast("dict[str, Any]", content)
    known = (*_PER_SLICE, *_SCALARS)
    strange = next((key for key in given if key not in known), None)
    if strange is not None:
        raise ToolError(f"unknown key {strange!r}; costs have {', '.join(known)}")
    missing = [key for key in _NEEDED if key not in given]
    if missing:
        raise ToolError(f"the costs have no {' and no '.join(missing)}")
    figures = {key: _figures(key, value) for key, value in given.items()}
    lengths = {key: len(value) for key, value in figures.items() if isinstance(value, list)}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise ToolError(f"the lists have different lengths: {said}; each has one figure a slice")
    slices = next(iter(lengths.values()), slices)
    if not slices:
        raise ToolError("the lists are empty; each has one figure a slice")
    if not lengths:
        shares = {key: cast("float", figures[key]) for key in _PER_SLICE if key in figures}
        figures |= {key: figure * ranks / slices for key, figure in shares.items()}
    return costs(slices, **cast("dict[str, Any]", figures))


def _figures(key: str, value: Any) -> float | list[float]:
    if isinstance(value, list) and key in _PER_SLICE:
        figures = cast("list[Any]", value)
        return [_figure(f"{key}[{at}]", figure) for at, figure in enumerate(figures)]
    return _figure(key, value)


def _figure(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ToolError(f"{where}: {value!r} is no number")
    try:
        return float(value)
    except OverflowError:
        raise ToolError(f"{where}: the number is too large") from None
