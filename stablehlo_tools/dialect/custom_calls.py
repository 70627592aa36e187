"""Classifies custom calls by their targets: those that stay on their device, and those that
communicate.

jax 0.12 writes an explicit asynchronous collective as two custom calls, with the groups as JSON:

    %f = stablehlo.custom_call @"all-gather-start"(%x)
        {mhlo.frontend_attributes = {async_collective_config = "{"replica_groups": [[0, 1]], …}"}}
    %y = stablehlo.custom_call @"all-gather-done"(%f)

A start returns a tensor of the done's result type, so that it can be passed like any tensor.
"""

from __future__ import annotations

import json
import re
from typing import Any

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ASYNC_DONE, CUSTOM_CALL

# The collective that each of jax's explicit starts begins.
ASYNC_STARTS = {
    "all-gather-start": "all_gather",
    "all-reduce-start": "all_reduce",
    "all-to-all-start": "all_to_all",
    "collective-permute-start": "collective_permute",
    "reduce-scatter-start": "reduce_scatter",
}
START_OF_DONE = {start.removesuffix("start") + "done": start for start in ASYNC_STARTS}

# These only annotate the program and never run on a device, even with a side-effect flag.
_ANNOTATIONS = re.compile(
    r"shape_assertion|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|LayoutConstraint|"
    r"AssumeGatherIndicesInBound|annotate_device_placement|xla\.sdy\..*"
)

# These compute on their device or call their own host: jax's stable targets, libraries that XLA
# calls, ops that older artifacts write as custom calls, and callbacks.
_STAYING = re.compile(
    r"(cu|hip)(solver|sparse|blas)_\w+|(cu|hip)_(lu_pivots_to_permutation|threefry2x32\w*)|"
    r"lapack_\w+|Eigh|LuDecomposition|Qr|QrDecompositionBlock|"
    r"ProductOfElementaryHouseholderReflectors|ApproxTopK|PartialReduce|AggregateToTopK|TopK|"
    r"(mhlo|chlo)\.(topk|top_k|erf|erfc|erf_inv|tan|a?(cos|sin|tan)h?|lgamma|digamma|polygamma|"
    r"zeta|square|bessel_i1e|next_after|ragged_dot)|"
    r"stablehlo\.dynamic_(approx_top_k|reduce_window|rng_bit_generator|top_k)|"
    r"AllocateBuffer|CreateBuffer|Pin|Unpin|MoveToHost|MoveToDevice|PadToStatic|SliceToDynamic|"
    r"SetBound|X64(Combine|SplitLow|SplitHigh)|Resize(Nearest|Bilinear)(Grad)?|"
    r"__(cudnn|cublas|cusolver|cufft|cub|onednn)\$.*|__gpu\$xla\.gpu\.triton|triton_kernel_call|"
    r"tf\.call_tf_function|xla_(ffi_)?(partitioned_)?(buffer_)?python_\w+"
)
_TOP_K = re.compile(r"((mhlo|chlo)\.)?(topk|top_k|TopK)")
# Factorizations and similar, which handle each matrix of a batch independently.
_OF_MATRICES = re.compile(
    r"(lapack|cusolver|hipsolver)_\w+|Eigh|LuDecomposition|Qr|QrDecompositionBlock|"
    r"ProductOfElementaryHouseholderReflectors|Cholesky"
)
# Attributes with an assumption about a custom call, while programs are compared.
MAY_COMMUNICATE = "stablehlo_tools.may_communicate"
STAYS = "stablehlo_tools.stays_on_device"

_KERNEL_NAME = re.compile(r'\bname = "([^"]*)"')  # in Triton's configuration
_TPU_KERNEL = "tpu_custom_call"
_GPU_KERNEL = re.compile(r"mosaic_gpu\w*")
# In the configuration or the code of a Mosaic GPU kernel that reaches other devices.
_GPU_PEERS = re.compile(
    r"nvshmem|xla_replica_ids|symmetric_memory_parameters|collective_metadata_used|"
    r"uses_xla_collective_metadata = true"
)


def target_of(call: ir.Operation) -> str:
    """Returns the target of a custom call."""
    return ir.StringAttr(call.attributes["call_target_name"]).value


def called_target(op: ir.Operation) -> str:
    """Returns the target of a custom call; `""` for other ops."""
    return target_of(op) if op.name == CUSTOM_CALL else ""


def backend_config(op: ir.Operation) -> str:
    """Returns a custom call's configuration for the compiler, as text; `""` without one."""
    config = op.attributes.get("mhlo.backend_config", op.attributes.get("backend_config"))
    if config is None:
        return ""
    if isinstance(config, ir.StringAttr):
        return config.value_bytes.decode(errors="replace")  # it may be any bytes
    return str(config)


def kernel_name(op: ir.Operation) -> str:
    """Returns the name of a Pallas kernel; `""` for other ops."""
    if op.name != CUSTOM_CALL:
        return ""
    named = op.attributes.get("kernel_name")
    if isinstance(named, ir.StringAttr):
        return named.value
    found = _KERNEL_NAME.search(backend_config(op))
    return found.group(1) if found else ""


def label(op: ir.Operation) -> str:
    """Returns an op's name for a message, with the target of a custom call."""
    return f'{op.name} @"{target_of(op)}"' if op.name == CUSTOM_CALL else op.name


def is_annotation(op: ir.Operation) -> bool:
    """Returns True if an op is a custom call that only annotates its operand."""
    return _ANNOTATIONS.fullmatch(called_target(op)) is not None


def is_top_k(call: ir.Operation) -> bool:
    """Returns True if a custom call returns the largest elements of the last dimension and their
    indices."""
    return _TOP_K.fullmatch(target_of(call)) is not None and len(call.operands) == 1


def is_of_matrices(call: ir.Operation) -> bool:
    """Returns True if a custom call handles each matrix of a batch independently."""
    return _OF_MATRICES.fullmatch(target_of(call)) is not None


def is_async_done(op: ir.Operation) -> bool:
    """Returns True if an op waits for an asynchronous collective and returns its result."""
    return op.name == ASYNC_DONE or called_target(op) in START_OF_DONE


def is_future(value: ir.Value) -> bool:
    """Returns True if a tensor is the result of an explicit start, for its done.

    Compilers crash at a barrier on one. It is recognized by the start that makes it or a done that
    reads it; a carry from one to the other has at least one of them.
    """
    maker = None if isinstance(value.owner, ir.Block) else value.owner.operation
    if maker is not None and called_target(maker) in ASYNC_STARTS:
        return True
    users = (use.owner.operation for use in value.uses)
    return any(user.name == CUSTOM_CALL and is_async_done(user) for user in users)


def stays_on_device(call: ir.Operation) -> bool:
    """Returns True if a custom call is known to reach no other device."""
    target = target_of(call)
    if STAYS in call.attributes or target in START_OF_DONE:
        return True
    if _ANNOTATIONS.fullmatch(target) or _STAYING.fullmatch(target):
        return True
    if target == _TPU_KERNEL:
        return not _tpu_kernel_communicates(call.attributes.get("backend_config"))
    if _GPU_KERNEL.fullmatch(target):
        config = call.attributes.get("mhlo.backend_config", call.attributes.get("backend_config"))
        return config is not None and _GPU_PEERS.search(str(config)) is None
    return False


def _tpu_kernel_communicates(config: ir.Attribute | None) -> bool:
    """Returns True if a Pallas kernel's configuration states communication, or cannot be read."""
    if not isinstance(config, ir.StringAttr):
        return True
    try:
        read: Any = json.loads(config.value)
        return bool(read["custom_call_config"].get("has_communication", False))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return True
