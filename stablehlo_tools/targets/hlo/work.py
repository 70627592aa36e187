"""The `KernelWork` of one HLO instruction: that of the kernel that it becomes.

A fusion is one kernel. It reads its operands and writes its results; intermediate values stay on
the chip. The products inside it are matrix work, its other instructions vector work:

    vector_flops  one operation per element of each instruction, or as many as
                  `cost.element_operations` states
    bytes         those of operands and results; if an operand is only sliced or gathered from, only
                  the part read; if a result is updated in place, only the update

Arrays of XLA:TPU, in device memory or in vector memory, count in whole registers. Rows and columns
are padded to tiles, and tiles of fewer than 8 rows to 8 rows. Written elements of fewer than 32
bits count as 32, because they are packed one register at a time. libtpu's estimated_cycles are
proportional to this.

`aliases` and `homes` state the results that share the memory of an operand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from stablehlo_tools.cost.element_operations import element_operations, sort_operations
from stablehlo_tools.cost.kernels import TILED_REDUCTION, KernelWork, Matmul, WorkKind
from stablehlo_tools.cost.library_calls import LibraryCall, Tensor, call_work
from stablehlo_tools.hlo_input.async_forms import COLLECTIVES
from stablehlo_tools.hlo_input.instructions import HloInstruction
from stablehlo_tools.hlo_input.shapes import DEVICE_MEMORY, Array, stablehlo_type
from stablehlo_tools.targets.hlo.hlo_task_graph import Given
from stablehlo_tools.targets.hlo.matmul import is_product, matmul, matmul_type, precision
from stablehlo_tools.targets.hlo.module import HloComputation, HloModule, Path, parse_aliases

_NO_KERNEL = """
    parameter constant bitcast tuple get-tuple-element after-all create-token add-dependency domain
    opt-barrier optimization-barrier partition-id replica-id get-dimension-size set-dimension-size
"""
_ELEMENTWISE = """
    abs acos acosh add and asin asinh atan2 atanh bitcast-convert broadcast cbrt ceil clamp compare
    complex convert cosine cosh count-leading-zeros divide erf exponential exponential-minus-one
    floor imag iota is-finite log log-plus-one logistic map maximum minimum multiply negate not or
    popcnt power real reduce-precision remainder rng rng-bit-generator rng-get-and-update-state
    round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic
    shift-right-logical sign sine sinh sqrt stochastic-convert subtract tan tanh xor
"""
_COPIES = """
    concatenate copy dynamic-reshape dynamic-slice dynamic-update-slice pad reshape reverse slice
    transpose
"""

REDUCTIONS = frozenset({"reduce", "reduce-window", "scan", "select-and-scatter"})

# The kind of each instruction that is a kernel.
KINDS: dict[str, WorkKind] = {
    **dict.fromkeys(_ELEMENTWISE.split(), WorkKind.ELEMENTWISE),
    **dict.fromkeys(_COPIES.split(), WorkKind.COPY),
    **dict.fromkeys(REDUCTIONS, WorkKind.REDUCTION),
    **dict.fromkeys(("gather", "scatter"), WorkKind.GATHER),
    "sort": WorkKind.SORT,
    "topk": WorkKind.SORT,
    "dot": WorkKind.MATMUL,
    "convolution": WorkKind.CONVOLUTION,
    **dict.fromkeys(("cholesky", "custom-call", "fft", "triangular-solve"), WorkKind.OTHER),
    "ragged-dot": WorkKind.OTHER,
}

_WITHOUT_KERNEL = frozenset(_NO_KERNEL.split())
_TARGETS_WITHOUT_KERNEL = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollective",
    "ConcatBitcast",
    "CreateBuffer",
    "Pin",
    "SPMD",
    "Sharding",
    "Unpin",
    "annotate_device_placement",
    "xla.sdy",
)


def is_free(instruction: HloInstruction) -> bool:
    """Returns True if an instruction has no kernel: a view, a marker, an allocation."""
    if instruction.opcode == "custom-call":
        return instruction.target.startswith(_TARGETS_WITHOUT_KERNEL)
    return instruction.opcode in _WITHOUT_KERNEL


FREE = KernelWork(WorkKind.FREE)

_NESTED = frozenset({"fusion", "call"})

# The kind of a fusion is the first of these that occurs in it.
_TELLING = (
    WorkKind.CONVOLUTION,
    WorkKind.MATMUL,
    WorkKind.SORT,
    WorkKind.GATHER,
    WorkKind.REDUCTION,
    WorkKind.ELEMENTWISE,
    WorkKind.COPY,
)


def work(instruction: HloInstruction, computation: HloComputation, module: HloModule) -> KernelWork:
    """The work of one instruction of a schedule that is a kernel of its own, or FREE.

    Raises ToolError for an opcode that is not known.
    """
    opcode = instruction.opcode
    if is_free(instruction):
        return FREE
    operands = [a for name in instruction.operands for a in computation.by_name[name].results]
    if (  # XLA:TPU runs it on the scalar core, in parallel to kernels
        opcode in ("fusion", *KINDS)
        and all(a.elements == 1 and a.tiles for a in instruction.results)
        and all(a.elements == 1 for a in operands)
    ):
        return FREE
    if opcode in ("fusion", "fusion-start"):
        return _of_fusion(instruction, computation, module)
    if opcode not in KINDS:
        raise instruction.error("the time of this opcode is unknown")
    product = matmul(instruction, computation)
    moved = bytes_alone(instruction, computation)
    if product is not None:
        kind = WorkKind.MATMUL if opcode != "convolution" else _product_kind(instruction)
        dtype = _product_type(instruction, computation)
        return KernelWork(kind, moved, 0.0, (product,), dtype)
    if KINDS[opcode] is WorkKind.OTHER or opcode == "topk":
        known = call_work(_library_call(instruction, computation))
        return known or KernelWork(WorkKind.OTHER, moved, dtype=_result_type(instruction))
    return KernelWork(
        KINDS[opcode], moved, _operations(instruction, computation), (), _result_type(instruction)
    )


def _library_call(instruction: HloInstruction, computation: HloComputation) -> LibraryCall:
    """A custom call, or an opcode that has a routine, as `cost.library_calls` knows it."""
    operands = [a for name in instruction.operands for a in computation.by_name[name].results]
    return LibraryCall(
        target=instruction.target or instruction.opcode,
        operands=[_tensor(array) for array in operands],
        results=[_tensor(array, written=True) for array in instruction.results],
        config=instruction.line[instruction.after_opcode :].partition(", backend_config=")[2],
        kernel=f"{instruction.name} {instruction.op_name}",
        lengths=instruction.numbers("fft_length"),
    )


def _tensor(array: Array, written: bool = False) -> Tensor:
    return Tensor(array.dims, stablehlo_type(array.element_type), _memory_bytes(array, written))


def describe_callee(instruction: HloInstruction) -> str:
    """Returns the callee of an instruction of kind OTHER, as `custom_call @target kernel`."""
    if instruction.opcode != "custom-call":
        return instruction.opcode
    named = instruction.name.rstrip("0123456789").rstrip(".")
    return f"custom_call @{instruction.target}" + (f" {named}" if named != "custom-call" else "")


def _operations(instruction: HloInstruction, computation: HloComputation) -> float:
    """Returns the vector operations of an instruction other than a product."""
    opcode = instruction.opcode
    if opcode in REDUCTIONS or opcode == "sort":
        array = computation.by_name[instruction.operands[0]].results[0]
        per_element = 1.0
        across = opcode == "reduce"
        if opcode != "reduce":
            per_element, across = _window(instruction, array)
            array = max((array, instruction.results[0]), key=lambda a: a.elements)
        if opcode == "sort":
            per_element = sort_operations(max(array.dims, default=1))
        if across and array.tiles:
            per_element *= TILED_REDUCTION
        return math.prod(array.padded) * per_element * max(1, len(instruction.operands) // 2)
    written = instruction.results
    if opcode == "scatter":  # in place: only the rows of the updates
        written = computation.by_name[instruction.operands[-1]].results * len(written)
    each = element_operations(opcode.replace("-", "_"))
    return each * sum(math.prod(array.padded) for array in written)


_WINDOW = re.compile(r"\bsize=([\dx]+)(?:.*?\bpad=([\d_x-]+))?")


def _window(instruction: HloInstruction, array: Array) -> tuple[float, bool]:
    """Returns the elements of a window over an array, and True if it covers a whole dimension.

    XLA:TPU writes the maximum of a row, broadcast to the row, as windows that all cover the whole
    row: `size=1x4095 pad=0_0x2047_2047` of 2048. Such a row is reduced only once.
    """
    text = instruction.attribute("window")
    found = _WINDOW.search(text)
    if found is None:
        return 1.0, False
    sizes = [int(part) for part in found[1].split("x")]
    if found[2] is None or "dilate" in text:
        return float(math.prod(sizes)), False
    lows = [int(part.partition("_")[0]) for part in found[2].split("x")]
    ends = list(zip(sizes, lows, array.dims, strict=True))
    rows = [1 < dim <= low + 1 and dim + low <= size for size, low, dim in ends]
    within = [1 if row else min(size, dim) for (size, _, dim), row in zip(ends, rows, strict=True)]
    return float(math.prod(within)), any(rows)


def _result_type(instruction: HloInstruction) -> str:
    results = instruction.results
    return stablehlo_type(results[0].element_type) if results else "f32"


def _product_kind(instruction: HloInstruction) -> WorkKind:
    """Returns CONVOLUTION if the window is wider than for a batch dimension of XLA:TPU's dots."""
    spatial = instruction.attribute("window").count("x")
    labels = instruction.attribute("dim_labels")
    image = labels.startswith(("b01f", "b0f", "b012f")) and spatial >= 1
    return WorkKind.CONVOLUTION if image else WorkKind.MATMUL


def fused_instructions(
    fusion: HloInstruction, module: HloModule
) -> Iterator[tuple[HloInstruction, HloComputation]]:
    """The instructions inside a fusion, nested fusions opened, each with its computation."""
    return module.expand(fusion, lambda inner: inner.opcode in _NESTED)


def _of_fusion(instruction: HloInstruction, outer: HloComputation, module: HloModule) -> KernelWork:
    inside = list(fused_instructions(instruction, module))
    products: list[Matmul] = []
    dtype = ""
    vector = 0.0
    kinds: set[WorkKind] = set()
    for inner, computation in inside:
        if is_product(inner):
            product = matmul(inner, computation)
            assert product is not None
            products.append(product)
            dtype = dtype or _product_type(inner, computation)
            kinds.add(_product_kind(inner) if inner.opcode == "convolution" else WorkKind.MATMUL)
        elif inner.opcode in KINDS and not is_free(inner):
            vector += _operations(inner, computation)
            kinds.add(KINDS[inner.opcode])
        elif not is_free(inner) and inner.opcode not in COLLECTIVES:
            raise inner.error(f"the time of this opcode is unknown, in fusion {instruction.name}")
    moved = fusion_bytes(instruction, outer, module)
    kind = next((kind for kind in _TELLING if kind in kinds), WorkKind.COPY)
    return KernelWork(kind, moved, vector, tuple(products), dtype or _result_type(instruction))


def _product_type(instruction: HloInstruction, computation: HloComputation) -> str:
    """The element type that a product is computed in, with its precision."""
    dtype = stablehlo_type(matmul_type(instruction, computation))
    return dtype + precision(instruction) if dtype == "f32" else dtype


VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element"})
_PASSED = frozenset({"bitcast", "optimization-barrier", "opt-barrier", "while"})
UPDATES = frozenset({"dynamic-update-slice", "scatter"})

_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?)\)\}")


def aliases(instruction: HloInstruction, module: HloModule) -> dict[Path, tuple[int, Path]]:
    """Returns, for parts of the result, the operand and its part whose buffer they reuse.

    An update always writes in place, alone or at the end of a fusion: XLA has inserted a copy
    before it if it must not.
    """
    if instruction.opcode in UPDATES:
        return {(): (0, ())}
    operand_of: dict[Path, tuple[int, Path]] = {}
    if instruction.opcode in ("fusion", "fusion-start"):
        body = module.called_computation(instruction, "calls")
        for path, output in outputs(body):
            number = updated_parameter(output, body)
            if number is not None:
                operand_of[path] = (number, ())
    said = _ALIASING.search(instruction.line, instruction.after_opcode)
    return operand_of | parse_aliases(said.group(1) if said else "")


def outputs(body: HloComputation) -> list[tuple[Path, HloInstruction]]:
    """The results of a fused computation, each with its place."""
    root = body.root
    if root.opcode != "tuple":
        return [((), root)]
    return [((i,), body.by_name[name]) for i, name in enumerate(root.operands)]


def through_views(instruction: HloInstruction, body: HloComputation) -> HloInstruction:
    """Returns the instruction that an instruction is a view of, or itself."""
    while instruction.opcode in VIEWS and instruction.operands:
        instruction = body.by_name[instruction.operands[0]]
    return instruction


def updated_parameter(output: HloInstruction, body: HloComputation) -> int | None:
    """Returns the number of the parameter that a result updates in place or returns unchanged."""
    source = through_views(output, body)
    if source.opcode in UPDATES:
        source = through_views(body.by_name[source.operands[0]], body)
    return int(source.literal) if source.opcode == "parameter" else None


def homes(computation: HloComputation, places: Given, module: HloModule) -> dict[str, Given]:
    """Returns the existing storages that instructions write parts of their results to, by name.

    `places` maps parts of the computation's result to the storages that they end up in.
    """
    storages_by_writer: dict[str, dict[Path, tuple[int, ...]]] = {}
    for path, storages in places.items():
        source = written_by(computation, path, module)
        if source is not None:
            storages_by_writer.setdefault(source[0].name, {}).setdefault(source[1], storages)
    return dict(storages_by_writer)


def written_by(
    computation: HloComputation, path: Path, module: HloModule
) -> tuple[HloInstruction, Path] | None:
    """Returns the instruction, and the part of its result, whose buffer holds a part of the result.

    Returns None if the buffer is that of a parameter.
    """
    instruction = computation.root
    while True:
        updated = aliases(instruction, module).get(path)
        if updated is not None:
            name, path = instruction.operands[updated[0]], updated[1]
        elif instruction.opcode == "tuple" and path:
            name, path = instruction.operands[path[0]], path[1:]
        elif instruction.opcode == "get-tuple-element":
            name, path = instruction.operands[0], (*instruction.numbers("index"), *path)
        elif instruction.opcode in _PASSED:
            name = instruction.operands[0]
        else:
            return None if instruction.opcode == "parameter" else (instruction, path)
        instruction = computation.by_name[name]


_VECTOR_MEMORY = 1  # XLA:TPU's memory space on the chip
_SUBLANES = 8  # XLA:TPU's registers: 8 rows of 128 lanes of 32 bits
_LANE_BITS = 32
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


def _memory_bytes(array: Array, written: bool = False) -> float:
    """The bytes of an array as traffic, in whole registers of XLA:TPU."""
    if array.space not in (DEVICE_MEMORY, _VECTOR_MEMORY):
        return 0.0
    traffic = float(array.padded_bytes)
    if array.tiles:
        tile = array.tiles[0]
        if len(tile) > 1 and tile[-2] < _SUBLANES:
            traffic *= _SUBLANES / tile[-2]
        if written and 0 < array.bits < _LANE_BITS:
            traffic *= _LANE_BITS / array.bits
    return traffic


def _all_bytes(instruction: HloInstruction, written: bool = False) -> float:
    return sum(_memory_bytes(array, written) for array in instruction.results)


def bytes_alone(instruction: HloInstruction, computation: HloComputation) -> float:
    """Returns the bytes that an instruction outside of a fusion reads and writes."""
    operands = [computation.by_name[name] for name in instruction.operands]
    opcode = instruction.opcode
    written = _all_bytes(instruction, written=True)
    if opcode in ("dynamic-slice", "slice"):
        return written + _all_bytes(instruction)
    if opcode == "gather":
        return written + _all_bytes(instruction) + _all_bytes(operands[1])
    # In place: only the update is read and written.
    if opcode == "dynamic-update-slice":
        return 2 * _all_bytes(operands[1])
    if opcode == "scatter":
        # Reads the updates, and reads and writes as many rows of the operand.
        return 3 * sum(_all_bytes(update) for update in operands[len(operands) // 2 :])
    moved = written + sum(_all_bytes(operand) for operand in operands)
    if opcode != "sort":
        return moved
    # A bitonic sort reads and writes its keys log2(n) (log2(n) + 1) / 2 times. The steps over up to
    # 2**10 neighbours share one pass.
    array = operands[0].results[0]
    dimension = (instruction.numbers("dimensions") or (len(array.dims) - 1,))[0]
    depth = math.ceil(math.log2(max(2, array.dims[dimension])))
    above = max(0, depth - 10)
    return moved * (1 + above * (above + 1) / 2)


def fusion_bytes(instruction: HloInstruction, outer: HloComputation, module: HloModule) -> float:
    """The bytes that a fusion reads and writes."""
    body = module.called_computation(instruction, "calls")
    total = 0.0
    for name, parameter in zip(instruction.operands, body.parameters, strict=True):
        whole = sum(_memory_bytes(array) for array in outer.by_name[name].results)
        total += min(whole, _read(parameter, body, whole, module))
    return total + sum(_written_bytes(root, body) for _, root in outputs(body))


def _read(value: HloInstruction, body: HloComputation, whole: float, module: HloModule) -> float:
    """Returns the bytes that a fused computation reads of one of its parameters."""
    total = 0.0
    for user in body.users.get(value.name, []):
        place = user.operands.index(value.name)
        if user.opcode in VIEWS:
            total += _read(user, body, whole, module)
        elif user.opcode in _SLICES and place == 0:
            total += _share(user, whole, value)
        elif user.opcode in ("dynamic-update-slice", "scatter") and place == 0:
            continue
        elif user.opcode == "fusion":
            inner = module.called_computation(user, "calls")
            total += _read(inner.parameters[place], inner, whole, module)
        elif user.opcode != "tuple" and not _is_communication(user):
            return whole
    return total


def _share(slice_: HloInstruction, whole: float, value: HloInstruction) -> float:
    """The bytes of a slice of an operand, as the operand's memory counts."""
    size = sum(array.padded_bytes for array in value.results)
    taken = sum(array.padded_bytes for array in slice_.results)
    return whole * taken / size if size else 0.0


def _written_bytes(output: HloInstruction, body: HloComputation) -> float:
    """Returns the bytes that a fused computation writes of one of its results."""
    share = _all_bytes(output, written=True)
    source = through_views(output, body)
    if source.opcode == "parameter" or _is_communication(source):
        return 0.0
    in_place = updated_parameter(source, body) is not None
    if source.opcode == "dynamic-update-slice" and in_place:
        return _share(body.by_name[source.operands[1]], share, source)
    if source.opcode == "scatter" and in_place:
        updates = body.by_name[source.operands[-1]]
        return 2 * min(share, _share(updates, share, source))
    return share


def _is_communication(instruction: HloInstruction) -> bool:
    """Returns True for a collective or its mark: XLA:TPU passes its buffers through fusions."""
    return instruction.opcode in COLLECTIVES or instruction.target.startswith("AsyncCollective")
