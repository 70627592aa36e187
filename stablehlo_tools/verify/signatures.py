"""The inputs and outputs of a program: read, and compared between two programs.

A program must be callable with arrays alone: fixed sizes, known element types, no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, note, to_place
from stablehlo_tools.ir.platform_index import argument_number, is_platform_index
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function
from stablehlo_tools.verify.element_types import ElementType, element_type, from_dtype

# data: random values. key: words of a PRNG key. platform: the index of the platform to run as.
# nothing: a float0 array, which has a shape and no values.
_RESULT_NAME = "jax.result_info"
Role = Literal["data", "key", "platform", "nothing"]


@dataclass(frozen=True)
class SignatureValue:
    """One input or output. For a key, `element` and `shape` are those of its 32-bit words.

    `below` is the limit of an input of indices, 0 for others: see `index_limits`.
    """

    element: str
    shape: tuple[int, ...]
    name: str = ""
    role: Role = "data"
    key: str = ""
    below: int = 0

    @property
    def element_type(self) -> ElementType:
        """The element type; not defined for a float0 array."""
        found = element_type(self.element)
        assert found is not None, self
        return found

    @property
    def dtype(self) -> str:
        """`f32`; `key<threefry2x32>` for keys, whose `shape` ends in the shape of their words."""
        return f"key<{self.key}>" if self.role == "key" else self.element

    def __str__(self) -> str:
        """`f32[4,8]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class ProgramSignature:
    """The inputs and outputs of a program, in order."""

    inputs: tuple[SignatureValue, ...]
    outputs: tuple[SignatureValue, ...]


def exported_signature(artifact: Artifact) -> ProgramSignature:
    """Returns the signature of a jax.export artifact as its callers see it, pytrees flattened.

    Raises ToolError for symbolic sizes, ordered effects and dtypes that NumPy cannot hold.
    """
    import jax

    exported = artifact.exported
    assert exported is not None
    entry = entry_function(artifact.module)
    if exported.ordered_effects:
        effects = ", ".join(str(effect) for effect in exported.ordered_effects)
        raise ToolError(
            f"the program needs a token for each ordered effect ({effects}), which only a "
            "surrounding program can supply",
            entry.location,
        )
    # `args[0]['w']`, `kwargs['mask']`; `result[0]`, `result['loss']`, as jax.result_info has them.
    inputs = [
        ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
        for path in _leaf_paths(exported.in_tree)
    ]
    outputs = ["result" + jax.tree_util.keystr(path) for path in _leaf_paths(exported.out_tree)]
    sides = (("input", exported.in_avals, inputs), ("output", exported.out_avals, outputs))
    values = [
        tuple(
            _exported_value(aval, names[i] if names else "", f"{what} {i}", entry)
            for i, aval in enumerate(avals)
        )
        for what, avals, names in sides
    ]
    return ProgramSignature(*values)


def module_signature(module: ir.Module) -> ProgramSignature:
    """Returns the signature of a module's entry function.

    Raises a located ToolError for symbolic sizes, tokens and unknown element types.
    """
    entry = entry_function(module)
    type_ = ir.FunctionType(ir.TypeAttr(entry.attributes["function_type"]).value)
    arguments = _attributes(entry, "arg_attrs", len(type_.inputs))
    results = _attributes(entry, "res_attrs", len(type_.results))
    inputs: list[SignatureValue] = []
    for argument, attributes in zip(Function(entry).body.arguments, arguments, strict=True):
        what = f"input {argument_number(argument)}"
        value = _module_value(
            argument.type, to_place(argument.location).name, what, argument.location
        )
        if is_platform_index(attributes):
            value = SignatureValue(value.element, value.shape, value.name, "platform")
        inputs.append(value)
    outputs: list[SignatureValue] = []
    for i, (result, attributes) in enumerate(zip(type_.results, results, strict=True)):
        name = ""
        if attributes is not None and _RESULT_NAME in attributes:
            name = ir.StringAttr(attributes[_RESULT_NAME]).value
        outputs.append(_module_value(result, name, f"output {i}", entry.location))
    return ProgramSignature(tuple(inputs), tuple(outputs))


def count_platform_inputs(inputs: Sequence[SignatureValue]) -> int:
    """Counts the leading inputs that callers do not pass: the index of the platform."""
    return sum(value.role == "platform" for value in inputs)


def check_agreement(
    before: ProgramSignature, after: ProgramSignature, names: tuple[str, str]
) -> None:
    """Raises ToolError if the signatures differ, with the first input or output that does."""
    sides = (("input", before.inputs, after.inputs), ("output", before.outputs, after.outputs))
    for what, ours, theirs in sides:
        if len(ours) != len(theirs):
            raise ToolError(
                f"the signatures differ: {_count(len(ours), what)} in {names[0]}, "
                f"{_count(len(theirs), what)} in {names[1]}",
                notes=tuple(
                    note(f"{name}: {', '.join(map(str, side)) or 'none'}")
                    for name, side in zip(names, (ours, theirs), strict=True)
                ),
                hint=f"a program and its form after passes: opt {names[0]} -p PASSES -o AFTER",
            )
        first = count_platform_inputs(ours)
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            told = [(value.element, value.shape, value.role, value.key) for value in (one, other)]
            if told[0] != told[1]:
                name = one.name or other.name
                raise ToolError(
                    f"the signatures differ: {what} {i - first}{f' ({name})' if name else ''} is "
                    f"{one} in {names[0]}, {other} in {names[1]}"
                )


def _exported_value(aval: Any, name: str, what: str, entry: ir.Operation) -> SignatureValue:
    import jax

    label = f"{what} ({name})" if name else what
    if not all(isinstance(size, int) for size in aval.shape):
        shape = ", ".join(map(str, aval.shape))
        raise ToolError(
            f"{label} has the shape ({shape}), with unknown sizes: export it again with numbers "
            "for its symbolic dimensions",
            entry.location,
        )
    shape = tuple(int(size) for size in aval.shape)
    key = bindings.key_implementation(aval.dtype)
    if key is not None:
        implementation, words = key
        return SignatureValue("ui32", (*shape, *words), name, "key", implementation)
    if aval.dtype == jax.dtypes.float0:
        return SignatureValue("float0", shape, name, "nothing")
    element = from_dtype(np.dtype(aval.dtype))
    if element is None:
        raise ToolError(f"{label}: no random values of dtype {aval.dtype}", entry.location)
    return SignatureValue(element.name, shape, name)


def _module_value(type_: ir.Type, name: str, what: str, location: ir.Location) -> SignatureValue:
    if str(type_) == "!stablehlo.token":
        raise ToolError(f"{what} is a token, which only a surrounding program can supply", location)
    if not isinstance(type_, ir.RankedTensorType):
        raise ToolError(f"{what} is {type_}: only tensors can be compared", location)
    if not type_.has_static_shape:
        raise ToolError(f"{what} is {type_}: its sizes must be known to run it", location)
    element = element_type(str(type_.element_type))
    if element is None:
        raise ToolError(f"{what} is {type_}: no random values of this element type", location)
    return SignatureValue(element.name, tuple(type_.shape), name)


def _attributes(function: ir.Operation, which: str, count: int) -> Sequence[ir.DictAttr | None]:
    if which not in function.attributes:
        return [None] * count
    return [ir.DictAttr(entry) for entry in ir.ArrayAttr(function.attributes[which])]


def _leaf_paths(tree: Any) -> list[Any]:
    import jax

    try:
        filled = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
        return [path for path, _ in jax.tree_util.tree_flatten_with_path(filled)[0]]
    except Exception:  # a registered node may raise if its leaves are numbers
        return []


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
