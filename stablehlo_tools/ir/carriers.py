"""Appends values to the ops that carry values across regions and calls, and drops them.

A carrier is a `while`, `if`, `case`, `manual_computation`, `named_computation`, `call`,
`composite` or function. Values are appended and dropped at the end only, so that earlier positions
keep their meaning; only `drop_entry_argument` and `drop_entry_results` shift those after them. The
bindings cannot change the number of operands or results of an op, so the op is rebuilt: the new op
gets its regions, attributes and location, and the old op is erased.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import terminator

# Attributes that hold one entry per operand or per result.
_PER_OPERAND = ("in_shardings", "arg_attrs")
_PER_RESULT = ("out_shardings", "res_attrs", "sdy.sharding")
_ALIASED = "tf.aliasing_output"  # the result that uses an argument's memory


def rebuild(
    op: ir.Operation, operands: Sequence[ir.Value], result_types: Sequence[ir.Type]
) -> ir.Operation:
    """Replaces an op by a copy with other operands and result types; returns the copy.

    The uses of a result move to the result at the same position; results without one must be
    unused. Handles to the old op become invalid.
    """
    new = copy_without_regions(op, operands, result_types)
    for source, target in zip(op.regions, new.regions, strict=True):
        for block in list(source.blocks):
            block.append_to(target)
    for old, replacement in zip(op.results, new.results, strict=False):
        old.replace_all_uses_with(replacement)
    op.erase()
    return new


def copy_without_regions(
    op: ir.Operation, operands: Sequence[ir.Value], result_types: Sequence[ir.Type]
) -> ir.Operation:
    """Creates a copy of an op before it, with other operands and results and empty regions."""
    attributes = dict(op.attributes.items())
    grown = [value.type for value in operands[len(op.operands) :]]
    _resize_lists(op, attributes, _PER_OPERAND, len(operands) - len(op.operands), grown)
    grown = list(result_types[len(op.results) :])
    _resize_lists(op, attributes, _PER_RESULT, len(result_types) - len(op.results), grown)
    build = Builder(ir.InsertionPoint(op), op.location)
    return build.create(op.name, operands, result_types, attributes, regions=len(op.regions))


def append(
    op: ir.Operation, operands: Sequence[ir.Value], result_types: Sequence[ir.Type]
) -> ir.Operation:
    """Returns the op rebuilt with operands and results appended."""
    types = [result.type for result in op.results]
    return rebuild(op, [*op.operands, *operands], [*types, *result_types])


def drop(op: ir.Operation, operands: int, results: int) -> ir.Operation:
    """Returns the op rebuilt without its last operands and results, which must be unused."""
    kept = list(op.operands)[: len(op.operands) - operands]
    types = [result.type for result in op.results][: len(op.results) - results]
    return rebuild(op, kept, types)


def append_to_terminator(block: ir.Block, values: Sequence[ir.Value]) -> None:
    """Appends values to the operands of a block's terminator."""
    end = terminator(block)
    rebuild(end, [*end.operands, *values], [])


def drop_from_terminator(block: ir.Block, count: int) -> None:
    """Drops the last `count` operands of a block's terminator."""
    drop(terminator(block), count, 0)


def append_arguments(block: ir.Block, types: Sequence[ir.Type]) -> list[ir.Value]:
    """Appends block arguments, with the location of the op around the block; returns them."""
    location = block.owner.location
    return [block.add_argument(type_, location) for type_ in types]


def drop_arguments(block: ir.Block, count: int) -> None:
    """Removes the last block arguments, which must be unused."""
    for _ in range(count):
        block.erase_argument(len(block.arguments) - 1)


def resize_function(function: ir.Operation, arguments: int, results: int) -> None:
    """Updates a function's type and attribute lists after its arguments and results changed.

    `arguments` and `results` are the numbers added, negative if dropped.
    """
    block = Function(function).body
    for names, grown in ((("arg_attrs",), arguments), (("res_attrs",), results)):
        attributes = dict(function.attributes.items())
        _resize_lists(function, attributes, names, grown)
        for name in names:
            if name in attributes:
                function.attributes[name] = attributes[name]
    inputs = [argument.type for argument in block.arguments]
    outputs = [value.type for value in terminator(block).operands]
    type_ = ir.FunctionType.get(inputs, outputs, function.context)
    function.attributes["function_type"] = ir.TypeAttr.get(type_, context=function.context)


def drop_entry_argument(function: ir.Operation, position: int) -> None:
    """Erases an unused argument of a function without callers in the module."""
    block = Function(function).body
    block.erase_argument(position)
    if "arg_attrs" in function.attributes:
        entries = list(ir.ArrayAttr(function.attributes["arg_attrs"]))
        del entries[position]
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(entries, function.context)
    resize_function(function, 0, 0)


def drop_entry_results(function: ir.Operation, positions: Collection[int]) -> None:
    """Drops results of a function without callers in the module."""
    end = terminator(Function(function).body)
    kept = [i for i in range(len(end.operands)) if i not in positions]
    rebuild(end, [end.operands[i] for i in kept], [])
    if "res_attrs" in function.attributes:
        entries = ir.ArrayAttr(function.attributes["res_attrs"])
        attribute = ir.ArrayAttr.get([entries[i] for i in kept], function.context)
        function.attributes["res_attrs"] = attribute
    if "arg_attrs" in function.attributes:
        entries = [
            _renumber_alias(ir.DictAttr(entry), kept)
            for entry in ir.ArrayAttr(function.attributes["arg_attrs"])
        ]
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(entries, function.context)
    resize_function(function, 0, 0)


def _renumber_alias(entry: ir.DictAttr, kept: Sequence[int]) -> ir.DictAttr:
    """Returns the attributes of an argument; the result that may take its memory has another
    number, or is dropped."""
    fields = {field.name: field.attr for field in entry}
    alias = fields.pop(_ALIASED, None)
    if alias is not None and ir.IntegerAttr(alias).value in kept:
        position = kept.index(ir.IntegerAttr(alias).value)
        fields[_ALIASED] = ir.IntegerAttr.get(alias.type, position)
    return ir.DictAttr.get(fields, entry.context)


def _resize_lists(
    op: ir.Operation,
    attributes: dict[str, ir.Attribute],
    names: Sequence[str],
    grown: int,
    types: Sequence[ir.Type] = (),
) -> None:
    """Appends `grown` entries to lists of attributes, for values of `types`; drops if negative."""
    if grown and "mhlo.sharding" in attributes:
        raise ToolError(
            f"{op.name} has one mhlo.sharding for all its values, a GSPMD form that cannot be "
            "rewritten here: export with Shardy",
            op.location,
        )
    for name in names:
        if grown and name in attributes:
            attributes[name] = _resize_entries(op, attributes[name], attributes, grown, types)


def _resize_entries(
    op: ir.Operation,
    attribute: ir.Attribute,
    attributes: dict[str, ir.Attribute],
    grown: int,
    types: Sequence[ir.Type],
) -> ir.Attribute:
    if isinstance(attribute, ir.ArrayAttr):
        entries = list(attribute)[:grown] if grown < 0 else list(attribute)
        empty = ir.DictAttr.get({}, context=attribute.context)
        return ir.ArrayAttr.get(entries + [empty] * grown, attribute.context)
    entries = list(bindings.TensorShardingPerValueAttr(attribute).shardings)
    entries = entries[:grown] if grown < 0 else entries
    entries += [_open_sharding(op, attributes, type_) for type_ in types]
    return bindings.TensorShardingPerValueAttr.get(entries, attribute.context)


def _open_sharding(
    op: ir.Operation, attributes: dict[str, ir.Attribute], type_: ir.Type
) -> ir.Attribute:
    """Returns a fully open sharding, on the mesh that the op's other shardings name."""
    for name in (*_PER_OPERAND, *_PER_RESULT):
        listed = attributes.get(name)
        if listed is None or not bindings.TensorShardingPerValueAttr.isinstance(listed):
            continue
        for sharding in bindings.TensorShardingPerValueAttr(listed).shardings:
            mesh = bindings.TensorShardingAttr(sharding).mesh_or_ref
            context = sharding.context
            rank = type_.rank if isinstance(type_, ir.RankedTensorType) else 0
            free = bindings.SdyDimensionShardingAttr.get([], False, context=context)
            return bindings.TensorShardingAttr.get(mesh, [free] * rank, context=context)
    raise ToolError(
        f"{op.name} has an empty list of shardings, so the mesh for a new value is unknown",
        op.location,
    )


def add_carries(
    loop: ir.Operation, starts: Sequence[ir.Value], ends: Sequence[ir.Value]
) -> list[ir.Value]:
    """Appends carries to a `while`, with initial values `starts` and yielded values `ends`.

    Returns their block arguments in the body.
    """
    types = [value.type for value in starts]
    rebuilt = append(loop, starts, types)
    condition, block = (region.blocks[0] for region in rebuilt.regions)
    append_arguments(condition, types)
    arguments = append_arguments(block, types)
    append_to_terminator(block, ends)
    return arguments
