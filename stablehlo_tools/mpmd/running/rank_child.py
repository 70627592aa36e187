"""Starts child processes that run rank programs, and exchanges arrays with them through files.

Arrays may have any element type, and are cut into the pieces of ranks and devices. An error of the
child is raised in the parent.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stablehlo_tools.diagnostics import ToolError, first_line, note
from stablehlo_tools.mpmd.manifest import Manifest, ManifestPiece
from stablehlo_tools.processes import activity, child
from stablehlo_tools.processes.child import virtual_devices
from stablehlo_tools.verify.element_types import Array, ElementType, element_type
from stablehlo_tools.verify.signatures import SignatureValue

PACKAGE = "stablehlo_tools.mpmd.running"
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([\w<>]+)>")


def ask(module: str, directory: Path, request: Any, devices: int, timeout: float, what: str) -> Any:
    """Runs a module of this package in a child that answers a request. `what` names it in messages.

    Raises the child's ToolError, or one if the child died or ran longer than `timeout` seconds.
    """
    variables = environment(devices, timeout)
    outcome = child.ask(
        f"{PACKAGE}.{module}", directory, request, timeout, variables, runs_programs=True
    )
    outcome.in_time(f"{what} took more than {timeout:g} s (--timeout) and was stopped")
    if outcome.answer is None:
        raise outcome.death("the process", what)
    if outcome.refusal is not None:
        raise about_the_set(outcome.refusal)
    if outcome.error:
        raise ToolError(f"{what} failed: {first_line(outcome.error)}")
    return outcome.answer


def serve(answer: Callable[[Path, Any], Any]) -> None:
    """Answers the request in the directory on the command line. Runs in the child."""
    activity.trust_input()  # the parent has read it, and reports how this process ended
    child.answer_request(answer)


def environment(devices: int, timeout: float) -> dict[str, str]:
    """Returns the environment of a process with so many CPU devices.

    Its compiler keeps the rounding of programs.
    """
    # ranks meet at a local address, which a proxy cannot reach
    inherited = {n: text for n, text in os.environ.items() if not n.lower().endswith("_proxy")}
    return virtual_devices(devices, timeout, ["--xla_allow_excess_precision=false"], inherited)


def inputs_of(rank: int) -> str:
    """Returns the file name for the arguments of a rank."""
    return f"inputs_{rank}.npz"


def outputs_of(rank: int) -> str:
    """Returns the file name for the results of a rank."""
    return f"outputs_{rank}.npz"


def write_arrays(path: Path, arrays: Sequence[Array], types: Sequence[str]) -> None:
    """Writes arrays of the given tensor types. The file appears when it is complete."""
    unfinished = path.with_suffix(".part")
    # As bytes, because NumPy's files lack the types of ml_dtypes.
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    with unfinished.open("wb") as file:
        np.savez(file, np.array(json.dumps(list(types))), *flat)
    unfinished.rename(path)


def read_arrays(path: Path) -> list[Array]:
    """Returns the arrays of a file of `write_arrays`."""
    with np.load(path) as stored:
        types: list[str] = json.loads(str(stored["arr_0"]))
        values = [value_of(type_) for type_ in types]
        return [
            stored[f"arr_{i}"].view(element_of(value).dtype).reshape(value.shape)
            for i, value in enumerate(values, start=1)
        ]


def cut_pieces(manifest: Manifest, arrays: Sequence[Array]) -> list[list[Array]]:
    """Returns the arguments of each rank's `main`, from the inputs of the original program."""
    pieces: list[dict[int, Array]] = [{} for _ in manifest.ranks]
    for entry, array in zip(manifest.inputs, arrays, strict=True):
        for piece in entry.pieces:
            pieces[piece.rank][piece.number] = array[index_of(piece)]
    return [[numbered[i] for i in sorted(numbered)] for numbered in pieces]


def join_pieces(manifest: Manifest, results: Sequence[Sequence[Array]]) -> list[Array]:
    """Returns the outputs of the original program, from the results of each rank's `main`.

    Raises ToolError if the pieces of an output overlap or do not cover it.
    """
    outputs: list[Array] = []
    for entry in manifest.outputs:
        value = value_of(entry.type, entry.path)
        whole = np.zeros(value.shape, element_of(value).dtype)
        filled = np.zeros(value.shape, np.int8)
        for piece in entry.pieces:
            whole[index_of(piece)] = results[piece.rank][piece.number]
            filled[index_of(piece)] += 1
        if (filled != 1).any():
            what = "twice" if (filled > 1).any() else "by no rank"
            raise ToolError(f"a part of output {entry.path} is returned {what}")
        outputs.append(whole)
    return outputs


def index_of(piece: ManifestPiece) -> tuple[slice, ...]:
    if piece.dim is None:
        return (...,)  # pyright: ignore[reportReturnType]
    return (*[slice(None)] * piece.dim, slice(piece.start, piece.limit))


def value_of(type_: str, name: str = "") -> SignatureValue:
    """Returns the value of a tensor type in text. Raises ToolError if NumPy cannot hold it."""
    match = _TENSOR.fullmatch(type_)
    element = None if match is None else element_type(match[2])
    if match is None or element is None:
        raise ToolError(f"{name or 'a value'} is {type_}: NumPy has no arrays of that type")
    shape = tuple(int(size) for size in match[1].split("x") if size)
    return SignatureValue(element.name, shape, name)


def type_of(value: SignatureValue) -> str:
    """Returns the tensor type of a value."""
    return f"tensor<{''.join(f'{size}x' for size in value.shape)}{value.element}>"


def element_of(value: SignatureValue) -> ElementType:
    """Returns the element type of a value."""
    element = element_type(value.element)
    assert element is not None, value
    return element


def about_the_set(refusal: ToolError) -> ToolError:
    """Returns the error with its locations as text: they are in a mapped copy, not in the set."""
    texts: list[str] = []
    for each in (refusal.diagnostic, *refusal.diagnostic.notes):
        place = each.place.render("").strip()
        texts.append(f"{each.message} (at {place})" if place.strip(":") else each.message)
    error = ToolError(texts[0], notes=tuple(map(note, texts[1:])))
    error.input_name = refusal.input_name
    return error
