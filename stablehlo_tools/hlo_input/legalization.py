"""HLO text to a StableHLO module: converted in a child process, legalized here.

Legalization rewrites the HLO ops that XLA's converter leaves to StableHLO that every pass accepts:

    %2 = "mhlo.fusion"(%0, %1) ({ ... })           the ops of its region
    mhlo.copy, mhlo.domain, mhlo.add_dependency    their first operand
    mhlo.bitcast                                   transpose, reshape, transpose, by the layouts
    mhlo.async_start / async_done of a computation the computation, at the start
    AsyncCollectiveStart / -Done (XLA:TPU)         stablehlo.async_start / async_done
    stablehlo.dot                                  stablehlo.dot_general
    mhlo.erf, mhlo.topk and others of CHLO         the op of CHLO

Other MHLO ops stay: a pass that does not know such an op rejects it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Place, ToolError, from_mlir_error, to_place
from stablehlo_tools.dialect.custom_calls import target_of
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES
from stablehlo_tools.dialect.names import ASYNC_START, CUSTOM_CALL
from stablehlo_tools.hlo_input.async_forms import TPU_DONE, TPU_START
from stablehlo_tools.hlo_input.converter import mark_of, to_stablehlo
from stablehlo_tools.hlo_input.hlo_text import HloText
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.cleanup import major_first, rewrite_bitcast
from stablehlo_tools.ir.inline import copy_body, dissolve
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.shardy_round_trip import restore_shardy, set_entry
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import (
    functions_by_name,
    ops_named,
    ops_where,
    referenced_symbols,
    walk,
)


def read_hlo(data: bytes, name: str, context: ir.Context) -> tuple[ir.Module, HloText]:
    """Returns the module and its text. Raises ToolError at the line that cannot be converted."""
    try:
        source = HloText(data.decode(), name)
    except UnicodeDecodeError as error:
        raise ToolError(f"not text: byte {error.start} is not UTF-8") from None
    try:
        module = bindings.parse_module(to_stablehlo(source), context)
        _legalize(module, source)
        module.operation.verify()
    except ir.MLIRError as error:
        # At the line of the instruction: XLA's parser does not check all shapes.
        told = from_mlir_error(error, "this HLO is not valid StableHLO: ").diagnostic
        mark = mark_of(told.place.name)[1]
        place = told.place if mark is None else Place(None, source.place_of(*mark)[1], 1)
        raise ToolError(told.message, place) from None
    return module, source


_BITCAST, _FUSION = "mhlo.bitcast", "mhlo.fusion"
_FORWARDED = frozenset({"mhlo.copy", "mhlo.domain", "mhlo.add_dependency"})
_START, _UPDATE, _DONE = "mhlo.async_start", "mhlo.async_update", "mhlo.async_done"
# Functions that are opcodes in HLO and ops in CHLO, but not in StableHLO.
_IN_CHLO = {
    f"mhlo.{name}": f"chlo.{name}"
    for name in ("acos", "acosh", "asin", "asinh", "atanh", "cosh", "erf", "mulhi", "sinh")
}
_CHAIN = "chain_id"  # the frontend attribute that is equal for all parts of an XLA:TPU async pair
_OF_LAYOUTS = ("result_layout", "source_layout", "xla_shape", "output_operand_aliasing")
_KEPT_OF_MODULE = frozenset({"sym_name", "mhlo.num_partitions", "mhlo.num_replicas"})
_TILED = ":T("
_ALIASES, _ALIASED = "mhlo.input_output_alias", "tf.aliasing_output"


def _legalize(module: ir.Module, source: HloText) -> None:
    """Legalizes a marked module of the converter in place and removes the marks.

    If the text is scheduled, the ops are sorted in the order of the schedule. Raises ToolError, at
    the line of the text, for an unsupported form of async op.
    """
    if source.is_scheduled:
        # Sorts the ops of each block by their positions in the text. An op without a position, such
        # as a constant that the converter made, comes as soon as its operands are defined.
        for op in ops_where(module.operation, lambda op: len(op.regions) > 0):
            for region in op.regions:
                for block in region.blocks:
                    _sort(block)
    _unmark(module, source)
    # In reverse order, so that ops nested in a fusion come before it. `Patterns` visits ops from
    # first to last, which would change the order of a value's uses, and so the written bytes.
    for op in reversed(ops_named(module.operation, {_FUSION, *_RULES})):
        if op.name == _FUSION:
            dissolve(op)
        elif (values := _RULES[op.name](op)) is not None:
            replace(op, values)
    _run_at_start(module)
    restore_shardy(module)
    _drop_unreachable(module)
    for function in functions_by_name(module).values():
        _pair_tpu_collectives(function)
    _state_facts(module, source)


# Locations and order


def _mark(location: ir.Location) -> tuple[int, int] | None:
    if isinstance(location, ir.NameLoc):
        return mark_of(location.name_str)[1]
    if isinstance(location, ir.FusedLoc):
        marks = (_mark(part) for part in location.locations if isinstance(part, ir.Location))
        return next((mark for mark in marks if mark is not None), None)
    return None


def _sort(block: ir.Block) -> None:
    ops = [view.operation for view in block.operations]
    places: dict[ir.Value, int] = {}
    keys: list[int] = []
    for op in ops:
        mark = _mark(op.location)
        ready = max((places.get(value, -1) for value in op.operands), default=-1)
        place = ready if mark is None else max(ready, mark[1])
        places.update((result, place) for result in op.results)
        keys.append(place)
    body = ops[:-1]  # the terminator stays where it is
    order = sorted(range(len(body)), key=lambda position: keys[position])
    if order != list(range(len(body))):
        for position in order:
            body[position].move_before(ops[-1])


def _unmark(module: ir.Module, source: HloText) -> None:
    """Gives each op the location that its instruction states, else its line in the text."""
    context = module.context

    def plain(location: ir.Location) -> ir.Location:
        mark = _mark(location)
        if mark is None or not isinstance(location, ir.NameLoc):
            return location
        name = mark_of(location.name_str)[0]
        inner = location.child_loc
        if to_place(inner) != Place():
            return ir.Location.name(name, inner, context=context) if name else inner
        computation, line = source.place_of(*mark)
        here = ir.Location.file(source.name, line, 1, context=context)
        here = ir.Location.name(computation, here, context=context)  # the function, as jax has it
        return ir.Location.name(name, here, context=context) if name else here

    def visit(op: ir.Operation) -> ir.WalkResult:
        op.location = plain(op.location)
        for region in op.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    argument.set_location(plain(argument.location))
        for name in _OF_LAYOUTS:
            if name in op.attributes and op.name != _BITCAST:
                del op.attributes[name]
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)


# Ops that have another name


# dot(x, y) -> dot_general(x, y), the last dimension of x contracted with the first of y
def _rewrite_dot(op: ir.Operation) -> Sequence[ir.Value]:
    last = len(shape_of(op.operands[0])) - 1
    numbers = ir.Attribute.parse(
        f"#stablehlo.dot<lhs_contracting_dimensions = [{last}], rhs_contracting_dimensions = [0]>",
        op.context,
    )
    kept = {
        a: op.attributes[a] for a in ("precision_config", FRONTEND_ATTRIBUTES) if a in op.attributes
    }
    return _write_as(op, "stablehlo.dot_general", {**kept, "dot_dimension_numbers": numbers})


def _write_as(
    op: ir.Operation, name: str, attributes: dict[str, ir.Attribute] | None = None
) -> Sequence[ir.Value]:
    """Writes an op with another name, and with the same operands and result types."""
    types = [value.type for value in op.results]
    operands, point = list(op.operands), ir.InsertionPoint(op)
    return ir.Operation.create(name, types, operands, attributes, loc=op.location, ip=point).results


# mhlo.bitcast(x) -> transpose(reshape(transpose(x))): the elements in the order of memory
def _rewrite_bitcast(op: ir.Operation) -> Sequence[ir.Value] | None:
    given, result = op.operands[0], op.results[0]
    one, other = element_of(given), element_of(result)
    if one != other:
        if not isinstance(one, ir.FloatType | ir.IntegerType):
            return None
        if not isinstance(other, ir.FloatType | ir.IntegerType) or one.width != other.width:
            return None
        build = Builder(ir.InsertionPoint(op), op.location)
        type_ = build.tensor(shape_of(given), other)
        given = op.operands[0] = build.op("bitcast_convert", [given], type_)
    # MLIR attributes do not express tiles. If a tiled layout could order the elements differently
    # from its order of dimensions, the op is kept.
    if "xla_shape" in op.attributes and _TILED in str(op.attributes["xla_shape"]):
        in_memory = _in_memory(op, "source_layout", shape_of(given))
        wanted = _in_memory(op, "result_layout", shape_of(result))
        # Tiles of the two most minor dimensions hold the same elements in both shapes.
        alike = len(in_memory) > 1 and len(wanted) > 1 and in_memory[-2:] == wanted[-2:]
        if not alike and [s for s in in_memory if s != 1] != [s for s in wanted if s != 1]:
            return None
    return [rewrite_bitcast(op)]


_RULES: dict[str, Callable[[ir.Operation], Sequence[ir.Value] | None]] = {
    # mhlo.copy(x) -> x
    **dict.fromkeys(_FORWARDED, lambda op: [op.operands[0]]),
    # mhlo.erf(x) -> chlo.erf(x)
    **dict.fromkeys(_IN_CHLO, lambda op: _write_as(op, _IN_CHLO[op.name])),
    "stablehlo.dot": _rewrite_dot,
    # mhlo.topk(x) {largest = true} -> chlo.top_k(x), which has no smallest
    "mhlo.topk": lambda op: (
        _write_as(op, "chlo.top_k", {"k": op.attributes["k"]})
        if ir.BoolAttr(op.attributes["largest"]).value
        else None
    ),
    _BITCAST: _rewrite_bitcast,
}


def tiled_bitcast(module: ir.Module) -> ir.Operation | None:
    """Returns a bitcast that was kept because of its tiles; None if there is none."""
    return next(iter(ops_named(module.operation, frozenset({_BITCAST}))), None)


def _in_memory(op: ir.Operation, layout: str, shape: Sequence[int]) -> list[int]:
    """Returns the sizes of the dimensions, the most major first."""
    return [shape[dimension] for dimension in major_first(op, layout, len(shape))]


# Computations that run asynchronously


def _run_at_start(module: ir.Module) -> None:
    """Inlines the computations that `mhlo.async_start` ops call, at the start.

    Most are copies and slices. Running one early changes no value. It does not reorder collectives
    either: XLA's converter writes those as `stablehlo.async_start`.
    """
    functions = functions_by_name(module)
    for start in ops_named(module.operation, {_START}):
        called = functions[ir.FlatSymbolRefAttr(start.attributes["called_computation"]).value]
        point = ir.InsertionPoint(start)
        _, returned = copy_body(Function(called).body, list(start.operands), point)
        _finish(start, returned)


def _finish(start: ir.Operation, returned: Sequence[ir.Value]) -> None:
    """Replaces the results of a start's done by the inlined values; erases the pair.

    Raises ToolError if an op other than an update or a done uses the start.
    """
    for use in list(start.results[0].uses):
        user = use.owner.operation
        if user.name == _UPDATE:
            _finish(user, returned)
        elif user.name == _DONE:
            replace(user, returned)
        else:
            raise ToolError(
                f"{user.name} uses the result of {start.name}: only the op that ends it may use it",
                user.location,
            )
    start.erase()


def _pair_tpu_collectives(function: ir.Operation) -> None:
    """Rewrites XLA:TPU's fusions for asynchronous collectives to async pairs.

    Every fusion of a pair repeats the collective; the start issues it. The start returns the
    operand, the result's buffer and flags; only the operand is a value of the program. Raises
    ToolError if a start has no done, or more than one, in its chain and block.
    """
    ends = _targets(function, TPU_DONE)
    for start in _targets(function, TPU_START):
        collective = producer(start.operands[0])
        chain = None if collective is None else _chain_id(collective)
        own = [end for end in ends if end.block == start.block and _chain_of(end) == chain]
        if chain is None or collective is None or len(own) != 1:
            raise ToolError(
                f"{TPU_START} needs exactly one {TPU_DONE} of its chain in the same computation: "
                "collectives that end in another iteration cannot be read from HLO text; take "
                "the program before XLA:TPU has scheduled it",
                start.location,
            )
        ends = [end for end in ends if end is not own[0]]
        future = _async_start(collective, start)
        result = own[0].results[0]
        builder = Builder(ir.InsertionPoint(own[0]), own[0].location)
        result.replace_all_uses_with(builder.op("async_done", [future], result.type))
        for part in _elements(start):
            if ir.IntegerAttr(part.attributes["index"]).value == 0:
                part.results[0].replace_all_uses_with(collective.operands[0])
        repeated = [
            op
            for op in ops_where(function, lambda _: True)
            if _chain_id(op) == chain
            and not (op.parent is not None and op.parent.name == ASYNC_START)
            and op.block == start.block
            and op != collective
        ]
        for op in (own[0], *repeated, *_elements(start), start, collective):
            if any(next(iter(value.uses), None) is not None for value in op.results):
                raise ToolError(
                    f"another op than the end uses {op.name} of an asynchronous pair of XLA:TPU",
                    op.location,
                )
            op.erase()


def _elements(start: ir.Operation) -> list[ir.Operation]:
    """Returns the get_tuple_element ops of the tuple that a start returns."""
    users = [use.owner.operation for use in start.results[0].uses]
    return [user for user in users if user.name == "stablehlo.get_tuple_element"]


def _async_start(collective: ir.Operation, point: ir.Operation) -> ir.Value:
    future = ir.Type.parse(f"!stablehlo.future<{collective.results[0].type}>", collective.context)
    start = ir.Operation.create(
        ASYNC_START,
        results=[future],
        operands=list(collective.operands),
        regions=1,
        loc=collective.location,
        ip=ir.InsertionPoint(point),
    )
    types = [value.type for value in collective.operands]
    block = start.regions[0].blocks.append(*types, arg_locs=[collective.location] * len(types))
    with ir.InsertionPoint(block):
        inner = collective.clone()
        for position, argument in enumerate(block.arguments):
            inner.operands[position] = argument
        ir.Operation.create(
            "stablehlo.return", operands=[inner.results[0]], loc=collective.location
        )
    return start.results[0]


def _targets(function: ir.Operation, target: str) -> list[ir.Operation]:
    return ops_where(function, lambda op: op.name == CUSTOM_CALL and target_of(op) == target)


def _chain_of(end: ir.Operation) -> str | None:
    owners = (producer(value) for value in end.operands)
    chains = (_chain_id(owner) for owner in owners if owner is not None)
    return next((chain for chain in chains if chain is not None), None)


def _chain_id(op: ir.Operation) -> str | None:
    if FRONTEND_ATTRIBUTES not in op.attributes:
        return None
    attributes = ir.DictAttr(op.attributes[FRONTEND_ATTRIBUTES])
    return ir.StringAttr(attributes[_CHAIN]).value if _CHAIN in attributes else None


# The module


def _drop_unreachable(module: ir.Module) -> None:
    """Drops unreachable private functions: XLA's converter writes every computation as one."""
    functions = functions_by_name(module)
    reached = {name for name, op in functions.items() if "sym_visibility" not in op.attributes}
    pending = list(reached)
    while pending:
        named = referenced_symbols(functions[pending.pop()]) & functions.keys() - reached
        reached |= named
        pending += named
    for name, op in functions.items():
        if name not in reached:
            op.erase()


def _state_facts(module: ir.Module, source: HloText) -> None:
    """Replaces the module's attributes with those of an artifact, and states aliased arguments."""
    op = module.operation
    i32 = ir.IntegerType.get_signless(32, module.context)
    main = functions_by_name(module).get("main")
    if main is not None and _ALIASES in op.attributes:
        # Marks each argument whose buffer a result reuses with the result's number, as jax does.
        for entry in map(ir.DictAttr, ir.ArrayAttr(op.attributes[_ALIASES])):
            argument = ir.DictAttr(entry["alias"])
            if len(ir.DenseI64ArrayAttr(argument["parameter_index"])):
                continue  # part of a tuple, which StableHLO functions have no arguments for
            number = ir.IntegerAttr(argument["parameter_number"]).value
            result = list(ir.DenseI64ArrayAttr(entry["output_index"])) or [0]
            set_entry(main, "arg_attrs", number, _ALIASED, ir.IntegerAttr.get(i32, result[0]))
    for name in list(op.attributes):
        if name not in _KEPT_OF_MODULE:
            del op.attributes[name]
    counts = {"mhlo.num_replicas": source.replicas, "mhlo.num_partitions": source.partitions}
    if any(count is not None for count in counts.values()):
        for name, count in counts.items():
            op.attributes[name] = ir.IntegerAttr.get(i32, count or 1)
