"""Builds the module that runs a program in the StableHLO reference interpreter.

Its `main` accepts and returns only bit patterns, so that NaNs are preserved and every element type
can be passed from NumPy. They are unsigned integers of 8 to 64 bits, device after device; a complex
tensor is two:

    %in = stablehlo.bitcast_convert %bits : (tensor<4xui32>) -> tensor<4xf32>   // for each input
    %out:2 = "interpreter.run_parallel"(%in, …) {programs = [[@verified, @verified]]}
    %bits = stablehlo.bitcast_convert %out#0 : (tensor<4xf32>) -> tensor<4xui32>

**Collectives.** The interpreter stores the operands of a collective's participants by its channel
and process group, and never deletes them (jaxlib 0.12: `ProcessGrid::rendezvous` copies `values`
instead of moving it). The same channel and group occur again in any loop, and for two collectives
without a channel. Then the first device to arrive does not wait, and gets the other's old operand.
So each collective gets its own channel and runs twice, and the devices wait for each other after
each run. The second run then gets the new operands of all devices.

    %y = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 0]]}
      ==>
    %stale = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 0]], channel = 1}
    call @meet() : () -> ()
    %y = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [1, 0]], channel = 1}
    call @meet() : () -> ()

`@meet` sends and receives. The interpreter executes transfers correctly if one device sends and one
other receives; the program's sends and recvs are rewritten to this form. All ids become flattened
ids, on a grid of one replica.

**Transfers.** The interpreter identifies a transfer only by its channel and ignores its pairs. So a
device that executes a recv waits for a sender even if no pair has the device. Therefore each pair
gets its own channel, which only its two devices use. A device without a sender gets zeros, like on
XLA:GPU, whose runtime clears the buffer.

    %y, %u = "stablehlo.recv"(%t) {pairs = [[0, 1]]}
      ==>
    %y, %u = "stablehlo.if"(%id == 1) ({ "stablehlo.recv"(%t) }, { 0.0, %t })
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import (
    Collective,
    ModuleFacts,
    find_collectives,
    set_groups,
)
from stablehlo_tools.analysis.rendezvous import is_host_transfer
from stablehlo_tools.analysis.replica_groups import ProcessGrid
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.communication_kinds import EXCHANGE_GROUPED, REDUCTION_GROUPED
from stablehlo_tools.dialect.device_placement import placement
from stablehlo_tools.dialect.names import PARTITION_ID, REPLICA_ID
from stablehlo_tools.ir.builder import DEVICE_TO_DEVICE, Builder, element_of, shape_of
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.walk import FUNCTION, entry_function, ops_named, ops_where, symbol_name
from stablehlo_tools.verify.device_grid import is_partitioned
from stablehlo_tools.verify.element_types import ElementKind, ElementType, element_type, real_part
from stablehlo_tools.verify.signatures import ProgramSignature, SignatureValue

_MOST_DEVICES = 2
_CONSTRAINT = "sdy.sharding_constraint"
_CREATE_TOKEN = "stablehlo.create_token"
_REWRITTEN = REDUCTION_GROUPED | EXCHANGE_GROUPED | {"collective_permute"}
_ENDS = ("send", "recv")  # in the order of a pair's ids


def interpreter_grid(module: ir.Module, grid: ProcessGrid) -> ProcessGrid:
    """Returns the grid on which the interpreter can run the module.

    This is `grid`, or one device if the module has shardings but no collectives, because shardings
    do not affect values. Raises a located ToolError if the interpreter cannot run it.
    """
    for op in ops_where(module.operation, lambda op: True):
        _check_supported(op)
    if is_partitioned(module) and not find_collectives(module):
        return ProcessGrid()
    if grid.size > _MOST_DEVICES:
        raise ToolError(
            f"the reference interpreter is trusted with at most {_MOST_DEVICES} devices, and this "
            f"program needs {grid.size}: its collectives time out if devices outnumber "
            "processors; use --backend cpu",
            module.operation.location,
        )
    return grid


def interpreter_module(module: ir.Module, signature: ProgramSignature, grid: ProcessGrid) -> bytes:
    """Returns bytecode of `module` with a `main` that runs it on every process of the grid."""
    context = bindings.new_context()
    bindings.register_interpreter_dialect(context)
    program = bindings.parse_module(bindings.write_bytecode(module), context)
    with context, ir.Location.unknown():
        for op in ops_where(program.operation, _hands_on):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        inline_all_calls(program, products=True)  # the interpreter cannot pass tokens to functions
        meeting = _separate_rendezvous(program, grid, _free_name(program, "meet"))
        entry = entry_function(program)
        name = _free_name(program, "verified")
        ir.SymbolTable.replace_all_symbol_uses(symbol_name(entry), name, program.operation)
        ir.SymbolTable.set_symbol_name(entry, name)
        entry.attributes["sym_visibility"] = ir.StringAttr.get("private")
        _write_main(program, name, signature, grid.size)
        written = bindings.parse_module(meeting, context)  # kept while its op is copied
        written.body.operations[0].operation.clone(ip=ir.InsertionPoint(program.body))
    program.operation.verify()
    return bindings.write_bytecode(program)


def parts(element: ElementType) -> int:
    """Returns the number of bit patterns that carry a tensor: 2 if it is complex, else 1."""
    return 2 if element.kind is ElementKind.COMPLEX else 1


def pattern_bits(element: ElementType) -> int:
    """Returns the width of the unsigned integers that carry an element type."""
    # NumPy has no narrower integers.
    return max(8, real_part(element).bits)


def _hands_on(op: ir.Operation) -> bool:
    """Returns True if an op only places a tensor on devices or in a memory."""
    return op.name == _CONSTRAINT or placement(op) is not None


def _check_supported(op: ir.Operation) -> None:
    """Raises a located ToolError for an op that the interpreter does not run."""
    if op.name in ("builtin.module", "sdy.mesh") or _hands_on(op):
        return
    if op.name == _CREATE_TOKEN:
        raise ToolError(
            f"the reference interpreter does not support {_CREATE_TOKEN}; use stablehlo.after_all "
            "without operands instead",
            op.location,
        )
    if op.name.partition(".")[0] not in ("stablehlo", "func") or op.name.endswith("custom_call"):
        raise ToolError(
            f"the reference interpreter does not run {op.name}; use --backend cpu", op.location
        )
    groups = op.attributes.get("replica_groups")
    if groups is not None and bindings.ReplicaGroupMeshAxesAttr.isinstance(groups):
        raise ToolError(
            f"{op.name}: the reference interpreter does not support replica groups by mesh axes; "
            "use --backend cpu",
            op.location,
        )


def _free_name(program: ir.Module, name: str) -> str:
    symbols = ir.SymbolTable(program.operation)
    while name in symbols:
        name += "_"
    return name


def _write_main(
    program: ir.Module, callee: str, signature: ProgramSignature, processes: int
) -> None:
    """Writes `main`, which runs the callee on each process and accepts and returns bit patterns."""
    inputs, outputs = signature.inputs * processes, signature.outputs * processes
    taken, given = (
        [type_ for value in side for type_ in _pattern_types(value)] for side in (inputs, outputs)
    )
    attributes: dict[str, ir.Attribute] = {
        "sym_name": ir.StringAttr.get("main"),
        "sym_visibility": ir.StringAttr.get("public"),
        "function_type": ir.TypeAttr.get(ir.FunctionType.get(taken, given)),
    }
    point = ir.InsertionPoint(program.body)
    main = ir.Operation.create(FUNCTION, regions=1, attributes=attributes, ip=point)
    block = main.regions[0].blocks.append(*taken)
    build = Builder(ir.InsertionPoint(block), main.location)
    patterns = iter(block.arguments)
    programs = ir.ArrayAttr.get([ir.FlatSymbolRefAttr.get(callee)] * processes)
    run = build.create(
        "interpreter.run_parallel",
        [_from_patterns(build, value, patterns) for value in inputs],
        [build.tensor(value.shape, ir.Type.parse(value.element)) for value in outputs],
        {"programs": ir.ArrayAttr.get([programs])},
    )
    build.create("func.return", [p for each in run.results for p in _to_patterns(build, each)], [])


def _pattern_types(value: SignatureValue) -> list[ir.Type]:
    element = value.element_type
    unsigned = ir.IntegerType.get_unsigned(pattern_bits(element))
    return [ir.RankedTensorType.get(value.shape, unsigned)] * parts(element)


def _same_width(real: ElementType) -> ir.Type:
    """Returns the unsigned integer type of an element type's width; `i1` for a boolean."""
    return ir.Type.parse("i1" if real.kind is ElementKind.BOOLEAN else f"ui{real.bits}")


def _from_patterns(build: Builder, value: SignatureValue, patterns: Iterator[ir.Value]) -> ir.Value:
    """Converts the next bit patterns to a tensor."""
    element = value.element_type
    real = real_part(element)
    own, same_width = ir.Type.parse(real.name), _same_width(real)
    tensors: list[ir.Value] = []
    for _ in range(parts(element)):
        narrow = build.convert(next(patterns), same_width)
        if own != same_width:
            narrow = build.op("bitcast_convert", [narrow], build.tensor(value.shape, own))
        tensors.append(narrow)
    if len(tensors) == 1:
        return tensors[0]
    return build.op("complex", tensors, build.tensor(value.shape, ir.Type.parse(element.name)))


def _to_patterns(build: Builder, value: ir.Value) -> list[ir.Value]:
    """Converts a tensor to its bit patterns."""
    element = element_type(str(element_of(value)))
    assert element is not None
    real = real_part(element)
    own, same_width = ir.Type.parse(real.name), _same_width(real)
    tensors = [value]
    if element.kind is ElementKind.COMPLEX:
        part = build.tensor(shape_of(value), own)
        tensors = [build.op(name, [value], part) for name in ("real", "imag")]
    if own != same_width:
        type_ = build.tensor(shape_of(value), same_width)
        tensors = [build.op("bitcast_convert", [tensor], type_) for tensor in tensors]
    wide = ir.IntegerType.get_unsigned(pattern_bits(element))
    return [build.convert(tensor, wide) for tensor in tensors]


def _separate_rendezvous(program: ir.Module, grid: ProcessGrid, meet: str) -> str:
    """Rewrites `program` in place, for `grid.size` partitions of one replica.

    Returns the text of the function `@meet`, which it now calls.
    """
    facts = ModuleFacts(grid, {})
    collectives = find_collectives(program)
    channels = [collective.channel_id for collective in collectives]
    for channel, collective in enumerate(collectives, start=1):
        if collective.kind in _REWRITTEN:
            groups = facts.groups(collective) or ()
            set_groups(collective, groups, channel)
            # In a group of one, a device can only get its own operand.
            if any(len(set(group)) > 1 for group in groups):
                op = collective.op
                again = op.clone(ip=ir.InsertionPoint.after(op))
                for old, new in zip(op.results, again.results, strict=True):
                    old.replace_all_uses_with(new)
                for run in (op, again):
                    ir.Operation.create(
                        "func.call",
                        attributes={"callee": ir.FlatSymbolRefAttr.get(meet)},
                        ip=ir.InsertionPoint.after(run),
                    )
    # replica_id and partition_id are computed from the flattened id.
    for op in ops_named(program.operation, (REPLICA_ID, PARTITION_ID)):
        build = Builder(ir.InsertionPoint(op), op.location)
        flat = build.op("partition_id", [], op.results[0].type)
        width = build.splat_like(grid.num_partitions, flat)
        own = build.same("divide" if op.name == REPLICA_ID else "remainder", flat, width)
        op.results[0].replace_all_uses_with(own)
        op.erase()
    # Above the new channels of collectives, and those that transfers have already.
    free = 1 + max([len(collectives), *channels])
    return _meeting(meet, _separate_transfers(collectives, facts, free))


def _meeting(name: str, channel: int) -> str:
    """Returns a function that device 0 and device 1 leave only after both have entered it."""
    first = _receive(channel, "1, 0") + _send(channel + 1, "0, 1")
    second = _send(channel, "1, 0") + _receive(channel + 1, "0, 1")
    return f"""
func.func private @{name}() {{
  %word = stablehlo.constant dense<1> : tensor<i32>
  %token = stablehlo.after_all : !stablehlo.token
  %id = stablehlo.partition_id : tensor<ui32>
  %index = stablehlo.convert %id : (tensor<ui32>) -> tensor<i32>
  %done = "stablehlo.case"(%index) ({{
    {first}
    stablehlo.return %word : tensor<i32>
  }}, {{
    {second}
    stablehlo.return %word : tensor<i32>
  }}) : (tensor<i32>) -> tensor<i32>
  return
}}"""


def _send(channel: int, pair: str) -> str:
    return f"""
    %sent = "stablehlo.send"(%word, %token) {_transfer(channel, pair)}
      : (tensor<i32>, !stablehlo.token) -> !stablehlo.token"""


def _receive(channel: int, pair: str) -> str:
    return f"""
    %received:2 = "stablehlo.recv"(%token) {_transfer(channel, pair)}
      : (!stablehlo.token) -> (tensor<i32>, !stablehlo.token)"""


def _transfer(channel: int, pair: str) -> str:
    return (
        f"<{{channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 1>, "
        f"is_host_transfer = false, source_target_pairs = dense<[[{pair}]]> : tensor<1x2xi64>}}>"
    )


def _separate_transfers(collectives: Sequence[Collective], facts: ModuleFacts, free: int) -> int:
    """Rewrites in place the sends and recvs with pairs of devices.

    partition_id must return flattened ids. Uses channels from `free` on; returns the first unused
    one. Raises a located ToolError for element types without a zero.
    """
    channels: dict[tuple[int, tuple[int, ...]], int] = {}
    for transfer in collectives:
        if transfer.kind not in _ENDS or is_host_transfer(transfer):
            continue
        pairs = facts.groups(transfer) or ()
        for pair in pairs:
            channels.setdefault((transfer.channel_id, pair), free + len(channels))
        if pairs:
            end = _ENDS.index(transfer.kind)
            op = transfer.op
            build = Builder(ir.InsertionPoint(op), op.location)
            unsigned = ir.IntegerType.get_unsigned(32, op.context)
            own = build.op("partition_id", [], build.tensor([], unsigned))
            received = [result.type for result in op.results][:-1]
            values = [*(_zeros(build, type_) for type_ in received), op.operands[-1]]
            for pair in pairs:
                is_own = build.compare("EQ", own, build.splat(pair[end], [], unsigned))
                values = _if_own(op, is_own, channels[transfer.channel_id, pair], values)
            replace(op, values)
    return free + len(channels)


def _if_own(
    op: ir.Operation, is_own: ir.Value, channel: int, otherwise: Sequence[ir.Value]
) -> list[ir.Value]:
    """Returns the results of a copy of the op if `is_own` holds, else `otherwise`."""
    build = Builder(ir.InsertionPoint(op), op.location)
    choice = build.create("stablehlo.if", [is_own], [value.type for value in otherwise], regions=2)
    taking, other = (region.blocks.append() for region in choice.regions)
    copy = op.clone(ip=ir.InsertionPoint(taking))
    handle = bindings.ChannelHandle.get(channel, DEVICE_TO_DEVICE, op.context)
    copy.attributes["channel_handle"] = handle
    for block, values in ((taking, copy.results), (other, otherwise)):
        Builder(ir.InsertionPoint(block), op.location).end_region(values)
    return list(choice.results)


def _zeros(build: Builder, type_: ir.Type) -> ir.Value:
    """Returns a tensor of the type with all bits zero. Raises a located ToolError."""
    tensor = ir.RankedTensorType(type_)
    element = element_type(str(tensor.element_type))
    if element is None:
        raise ToolError(
            f"zeros for a device that receives no value cannot be {type_}", build.location
        )
    if element.kind is ElementKind.COMPLEX:
        part = build.tensor(tensor.shape, ir.ComplexType(tensor.element_type).element_type)
        return build.op("complex", [_zeros(build, part)] * 2, type_)
    zero = "00" * element.dtype.itemsize
    return build.op("constant", [], type_, value=ir.Attribute.parse(f'dense<"0x{zero}"> : {type_}'))
