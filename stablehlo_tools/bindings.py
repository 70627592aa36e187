# pyright: basic
"""The only module that imports jaxlib's MLIR bindings or jax's internals.

Other modules import `ir` and these functions from here, so that a change in jaxlib affects only
this file. Importing it loads jaxlib's MLIR libraries (about a quarter of a second), but not jax.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jaxlib._jax as _jax
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir._mlir_libs._mlir import rewrite

# Import dialects only through their own modules. If an extension module (`_sdy`, …) comes first, it
# loads its dialect's module half-way, without its attributes, and breaks jax in this process.
from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo
from jaxlib.mlir.passmanager import PassManager
from jaxlib.version import __version__ as jaxlib_version

MINIMUM_JAXLIB = (0, 12)

if tuple(int(part) for part in jaxlib_version.split(".")[:2]) < MINIMUM_JAXLIB:
    raise ImportError(
        f"stablehlo-tools needs jaxlib >= {'.'.join(map(str, MINIMUM_JAXLIB))}, found "
        f"{jaxlib_version}: older XLA:CPU drops token chains"
    )

stablehlo.register_stablehlo_passes()

StablehloAxisRefAttr = stablehlo.AxisRefAttr
StablehloMeshAttr = stablehlo.MeshAttr
StablehloMeshAxisAttr = stablehlo.MeshAxisAttr
ReplicaGroupMeshAxesAttr = stablehlo.ReplicaGroupMeshAxesAttr
SdyMeshAttr = sdy.MeshAttr
SdyMeshAxisAttr = sdy.MeshAxisAttr
SdyAxisRefAttr = sdy.AxisRefAttr
SdySubAxisInfoAttr = sdy.SubAxisInfoAttr
OpShardingRuleAttr = sdy.OpShardingRuleAttr
TensorMappingAttr = sdy.TensorMappingAttr
DimMappingAttr = sdy.DimMappingAttr
SdyDimensionShardingAttr = sdy.DimensionShardingAttr
TensorShardingAttr = sdy.TensorShardingAttr
TensorShardingPerValueAttr = sdy.TensorShardingPerValueAttr
GatherDimensionNumbers = stablehlo.GatherDimensionNumbers
ScatterDimensionNumbers = stablehlo.ScatterDimensionNumbers
ConvDimensionNumbers = stablehlo.ConvDimensionNumbers
DotDimensionNumbers = stablehlo.DotDimensionNumbers
TokenType = stablehlo.TokenType
ChannelHandle = stablehlo.ChannelHandle
ComparisonDirectionAttr = stablehlo.ComparisonDirectionAttr
PatternRewriter = rewrite.PatternRewriter
RewritePatternSet = rewrite.RewritePatternSet
walk_and_apply_patterns = rewrite.walk_and_apply_patterns

_CALLBACKS = {
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
    "io_callback": "jax.experimental.io_callback",
    "pure_callback": "jax.pure_callback",
}
BYTECODE_MAGIC = b"ML\xefR"
_PORTABLE_PRODUCER = re.compile(rb"StableHLO_v(\d+\.\d+\.\d+)\x00")


def new_context() -> ir.Context:
    """Returns an MLIR context with exactly the dialects of a jax.export artifact."""
    context = ir.Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)  # includes func
    context.append_dialect_registry(registry)
    for register in (
        stablehlo.register_dialect,
        chlo.register_dialect,
        sdy.register_dialect,
        mhlo.register_mhlo_dialect,
    ):
        register(context)
    context.allow_unregistered_dialects = False
    return context


def load_quantized_types(context: ir.Context) -> None:
    """Registers `!quant.…` types in the context.

    No binding registers their dialect, and jaxlib's parser crashes on some of these types without
    it. The reader of portable artifacts loads the dialect into its context, so this reads one.
    """
    empty = serialize_portable_artifact(parse_module("module {}", context))
    deserialize_portable_artifact(empty, context)


def portable_version(data: bytes) -> str | None:
    """Returns the StableHLO version of a portable artifact; None for other bytes."""
    if not data.startswith(BYTECODE_MAGIC):
        return None
    # The producer string follows the magic and the bytecode version, a short varint.
    match = _PORTABLE_PRODUCER.search(data[:64])
    return match.group(1).decode() if match else None


def parse_module(data: str | bytes, context: ir.Context) -> ir.Module:
    """Parses and verifies MLIR text or bytecode. Raises `ir.MLIRError` if it is invalid."""
    with context:
        return ir.Module.parse(data)


def deserialize_portable_artifact(data: bytes, context: ir.Context) -> ir.Module:
    """Reads a StableHLO portable artifact. Raises an exception of jaxlib if it is invalid."""
    with context:
        return _jax.mlir.deserialize_portable_artifact(data)


def serialize_portable_artifact(module: ir.Module, version: str | None = None) -> bytes:
    """Writes a portable artifact, also of modules with `sdy` ops.

    Without a version it targets the same one as jax.export: every StableHLO of the last four weeks
    can read it.
    """
    return _jax.mlir.serialize_portable_artifact(module, version or export_version(), True)


def dot_dimension_numbers(attribute: ir.Attribute) -> Any:
    """Returns the dimension numbers of a dot, of StableHLO or MHLO."""
    own = stablehlo.DotDimensionNumbers.isinstance(attribute)
    return (stablehlo if own else mhlo).DotDimensionNumbers(attribute)


def conv_dimension_numbers(attribute: ir.Attribute) -> Any:
    """Returns the dimension numbers of a convolution, of StableHLO or MHLO."""
    own = stablehlo.ConvDimensionNumbers.isinstance(attribute)
    return (stablehlo if own else mhlo).ConvDimensionNumbers(attribute)


def export_version() -> str:
    """Returns the StableHLO version that jax.export targets."""
    return stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_4
    )


def current_version() -> str:
    """Returns the newest StableHLO version that this jaxlib can write."""
    return stablehlo.get_current_version()


def write_bytecode(module: ir.Module) -> bytes:
    """Returns the module as plain MLIR bytecode."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def parse_pass_pipeline(text: str, context: ir.Context) -> PassManager:
    """Returns a pass manager of registered C++ passes. Raises ValueError if MLIR lacks one."""
    with context:
        return PassManager.parse(text)


_MOSAIC_VERSION = "stable_mosaic.version"


def read_mosaic(bytecode: bytes) -> tuple[ir.Module, int]:
    """Returns the kernel of a `tpu_custom_call`, and the version of the format that it is stored
    in. Raises `ir.MLIRError` if it is invalid."""
    from jaxlib.mosaic.python import tpu

    context = ir.Context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    with context, ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        version = ir.IntegerAttr(module.operation.attributes[_MOSAIC_VERSION]).value
        PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
    return module, version


def write_mosaic(module: ir.Module, version: int) -> bytes:
    """Returns a kernel in the stored form of a version; changes the module."""
    with module.context, ir.Location.unknown():
        options = f"serialize=true target-version={version}"
        PassManager.parse(f"builtin.module(mosaic-serde{{{options}}})").run(module.operation)
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer, desired_version=0)
    return buffer.getvalue()


def register_interpreter_dialect(context: ir.Context) -> None:
    """Registers `interpreter.*` ops in the context (needed by `eval_module`)."""
    stablehlo.register_interpreter_dialect(context)


def eval_module(module: ir.Module, arguments: list[Any]) -> list[Any]:
    """Runs a module in the StableHLO reference interpreter."""
    return stablehlo.eval_module(module, arguments)


@dataclass(frozen=True)
class ExportedEnvelope:
    """The header of a jax.export file, readable even if this jax cannot read the rest."""

    serialization_version: int
    jax_version: str
    before_0_8_2: bool
    module: bytes


def exported_envelope(data: bytes) -> ExportedEnvelope:
    """Reads only the envelope. Raises exceptions of flatbuffers if the bytes are damaged."""
    from jax._src.export import serialization_generated

    exported = serialization_generated.Exported.GetRootAsExported(bytearray(data))
    return ExportedEnvelope(
        exported.SerializationVersion(),
        (exported.JaxVersion() or b"").decode(),
        # Since that release, the number of devices is a 32-bit field; before, it was another one.
        exported.NrDevices() == 0 and exported.NrDevicesShort() > 0,
        # NumPy array, or 0 from flatbuffers if there is none.
        bytes(exported.MlirModuleSerializedAsNumpy()),  # pyright: ignore[reportArgumentType]
    )


_UNREGISTERED = re.compile(r"unregistered type `([^`]+)`")  # in an error of jax
_STAND_INS: dict[str, Any] = {}  # what jax's registry has for a type, by its name


def deserialize_with_stand_ins(data: bytes) -> Any:
    """Returns the `Exported` of a file. Types that this process has not registered get stand-ins,
    which are written with the same bytes. Raises the errors of jax for other reasons."""
    from jax import export
    from jax._src.export import _export

    registry, added = _export.deserialization_registry, list[str]()
    try:
        while True:
            try:
                return export.deserialize(bytearray(data))
            except ValueError as error:
                unknown = _UNREGISTERED.search(str(error))
                if unknown is None or unknown[1] in added:
                    raise
                added.append(unknown[1])
                registry[unknown[1]] = _stand_in(unknown[1])
    finally:
        for name in added:  # so that the process can still register the type itself
            del registry[name]


def _stand_in(name: str) -> Any:
    if name not in _STAND_INS:
        from jax import export, tree_util
        from jax._src.export import _export

        class StandIn(tuple[Any, ...]):
            """The fields of an unknown type; `auxiliary` has its other data, as in the file."""

            auxiliary: bytes = b""

        def make(auxiliary: bytes, children: Iterable[Any]) -> StandIn:
            made = StandIn(children)
            made.auxiliary = auxiliary
            return made

        StandIn.__name__ = StandIn.__qualname__ = name
        tree_util.register_pytree_node(StandIn, lambda each: (each, each.auxiliary), make)
        export.register_pytree_node_serialization(
            StandIn, serialized_name=name, serialize_auxdata=bytes, deserialize_auxdata=bytes
        )
        _STAND_INS[name] = _export.deserialization_registry[name]
    return _STAND_INS[name]


def newest_serialization_version() -> int:
    """Returns the newest format of jax.export files that this jax reads."""
    from jax._src.export import serialization

    return serialization._SERIALIZATION_VERSION


# Passes of XLA:CPU that move an op into another kernel, or rewrite it with other rounding; for
# xla_disable_hlo_passes.
REROUNDING_PASSES = ("algsimp", "fusion", "small-while-loop-hoisting")
# Those that may also remove the difference between two programs. Without fusion, which only
# changes rounding, compiling takes several times as long.
SIMPLIFYING_PASSES = ("algsimp", "small-while-loop-hoisting")
# algsimp also rewrites ops for which XLA:CPU has no kernel.
INDISPENSABLE_PASSES = ("algsimp",)


def _compile_options(replicas: int, partitions: int, devices: list[Any], **settings: Any) -> Any:
    """Returns jax's options; partition p of replica r runs on device `r * partitions + p`."""
    import numpy as np
    from jax._src.compiler import get_compile_options

    # Ids need not be 0, 1, 2 …, for example if the devices are spread over processes.
    assignment = np.array([device.id for device in devices]).reshape(replicas, partitions)
    return get_compile_options(replicas, partitions, assignment, **settings)


def compile_for_devices(
    code: bytes,
    replicas: int,
    partitions: int,
    devices: list[Any],
    *,
    partitioned: bool,
    skipped_passes: Sequence[str] = (),
) -> Any:
    """Compiles MLIR bytecode with the devices' own backend.

    Partition p of replica r runs on the device at `r * partitions + p` in the list. If
    `partitioned`, XLA's partitioner divides the module by its shardings. Otherwise the module is
    the program of each device, and the partitioner is disabled: it refuses `partition_id`. XLA
    skips `skipped_passes`. Arguments must be on the devices, even if the module places some in the
    host's memory. Raises an exception of XLA if it refuses.
    """
    from jax._src.lax.linalg import initialize_lapack

    if b"lapack_" in code:  # jax sets these kernels only on lowering; before, they are null
        initialize_lapack()
    options = _compile_options(replicas, partitions, devices)
    _let_gspmd_divide_its_own(options, code)
    code = _on_devices(code)
    skipped = list(skipped_passes)
    skipped += [] if partitioned else ["spmd-partitioning", "shardy-xla"]
    if skipped:
        override = ("xla_disable_hlo_passes", ",".join(skipped))
        options.env_option_overrides = [*options.env_option_overrides, override]
    return devices[0].client.compile_and_load(code, _jax.DeviceList(tuple(devices)), options)


_MEMORY_KIND = "mhlo.memory_kind"


def _on_devices(code: bytes) -> bytes:
    """Returns the module with arguments and results in device memory.

    XLA:CPU crashes or hangs if it gets arrays in another memory than it was compiled for.
    """
    if _MEMORY_KIND.encode() not in code:
        return code
    module = parse_module(code, new_context())
    for op in module.body.operations:
        for side in ("arg_attrs", "res_attrs"):
            if side in op.attributes:
                entries = [
                    {e.name: e.attr for e in ir.DictAttr(entry) if e.name != _MEMORY_KIND}
                    for entry in ir.ArrayAttr(op.attributes[side])
                ]
                op.attributes[side] = ir.ArrayAttr.get(
                    [ir.DictAttr.get(entry, module.context) for entry in entries], module.context
                )
    return write_bytecode(module)


def compile_kept(code: bytes, devices: list[Any]) -> Any:
    """Compiles the program of one device as `compile_for_devices` does, devices as partitions.

    Uses jax's compilation cache if there is one (`jax_compilation_cache_dir`). The key is a hash of
    the content, and every process stores its program: jax itself stores only process 0's.
    """
    import hashlib
    import time

    from jax._src import compilation_cache as cache

    client, listed = devices[0].client, _jax.DeviceList(tuple(devices))
    if not cache.is_cache_used(client):
        return compile_for_devices(code, 1, len(devices), devices, partitioned=False)
    said = [str(client.platform_version), jaxlib_version, os.environ.get("XLA_FLAGS", "")]
    said += [str(device.id) for device in devices] + [str(devices[0].device_kind)]
    key = f"stablehlo-tools-{hashlib.sha256(code + repr(said).encode()).hexdigest()}"
    options = _compile_options(1, len(devices), devices)
    found, _ = cache.get_executable_and_time(key, options, client, listed)
    if found is None:
        began = time.monotonic()
        found = compile_for_devices(code, 1, len(devices), devices, partitioned=False)
        taken = int(time.monotonic() - began)
        cache.put_executable_and_time(key, "main", found, client, taken)
    return found


def coordinator_address() -> str:
    """Returns the address of the coordinator of `jax.distributed`; "" without one."""
    from jax._src.distributed import global_state

    return global_state.coordinator_address or ""


def coordination_client() -> Any:
    """Returns the client of `jax.distributed` in this process, which has a key-value store."""
    from jax._src.distributed import global_state

    return global_state.client


_OF_SHARDY = (b"sdy.sharding", b"sharding_constraint", b"manual_computation")


def _let_gspmd_divide_its_own(options: Any, code: bytes) -> None:
    """Disables Shardy for a module with only GSPMD's shardings.

    XLA would convert them to Shardy's and crash on some, for example `{devices=[4,1,2]<=[8]}` of an
    argument.
    """
    if b"mhlo.sharding" in code and not any(word in code for word in _OF_SHARDY):
        options.executable_build_options.use_shardy_partitioner = False


def run_on_devices(executable: Any, arguments: list[list[Any]], devices: list[Any]) -> Any:
    """Runs an executable of `compile_for_devices`; returns NumPy arrays `[output][device]`.

    `arguments[i][d]` is the NumPy array of input i on device d. Inputs are copied, so that donation
    cannot harm them.
    """
    import jax
    import numpy as np

    whole = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("device",)), jax.sharding.PartitionSpec()
    )

    def place_parts(parts: list[Any]) -> Any:
        # "Replicated", but with different contents: the only sharding that accepts any values.
        on_devices = [
            jax.device_put(np.array(part), device)
            for part, device in zip(parts, devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(parts[0].shape, whole, on_devices)

    results = executable.execute_sharded([place_parts(parts) for parts in arguments])
    outputs = results.disassemble_into_single_device_arrays()
    return [[np.asarray(part) for part in parts] for parts in outputs]


_HOST_CALLS: dict[str, Any] = {}  # keeps the callbacks of XLA alive


def register_host_call(target: str, function: Callable[[int, Any], None]) -> None:
    """Registers a Python function for custom calls of a target on XLA:CPU.

    It gets the addresses of the result (of a table of them, if there are several) and of the
    operands. If it raises, the process ends: the program has no other way to fail.
    """
    import ctypes
    import traceback

    import jax

    if target in _HOST_CALLS:
        return
    type_ = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))

    def call_or_exit(out: int, operands: Any) -> None:
        try:
            function(out, operands)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    _HOST_CALLS[target] = type_(call_or_exit)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    address = ctypes.cast(_HOST_CALLS[target], ctypes.c_void_p)
    made = capsule(address, b"xla._CUSTOM_CALL_TARGET", None)
    jax.ffi.register_ffi_target(target, made, platform="cpu", api_version=0)


def hlo_text_to_proto(text: str) -> bytes:
    """Converts HLO text to a serialized HloModuleProto. Raises an exception of XLA if invalid."""
    from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def normalize_hlo_text(text: str) -> str:
    """Returns HLO text as XLA prints it, e.g. without the abbreviations of its dumps. Raises as
    above."""
    from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

    return str(_hlo.hlo_module_from_text(text).to_string())


def hlo_proto_to_stablehlo(module: bytes) -> bytes:
    """Converts a serialized HloModuleProto to StableHLO in MLIR bytecode. Raises as above."""
    from jax.extend.mlir import hlo_to_stablehlo

    return hlo_to_stablehlo(module)


def hlo_sharding_text(data: bytes) -> str:
    """Returns a serialized OpSharding as text. Raises ValueError for other bytes."""
    import jaxlib._hlo as _hlo

    sharding = _hlo.OpSharding()
    sharding.ParseFromString(data)
    if not data or sharding.SerializeToString() != data:  # other bytes read as `{replicated}`
        raise ValueError(f"{data!r} is not a sharding that is known here")
    try:
        return _hlo.HloSharding.from_proto(sharding).to_string()
    except Exception as error:
        raise ValueError(f"XLA takes no such sharding: {error}") from None


def shard_indices(
    sharding: Any, shape: tuple[int, ...], partitions: int
) -> list[tuple[slice, ...]]:
    """Returns the part of a global array that each partition holds, as slices for NumPy.

    Raises AssertionError if the sharding does not divide the shape evenly.
    """
    import jaxlib._hlo as _hlo
    from jax._src.op_shardings import op_sharding_to_indices

    sharding = _hlo.HloSharding.from_proto(sharding)
    return list(op_sharding_to_indices(sharding, shape, partitions))


def size_names(size: Any) -> set[str]:
    """Returns the names in the size of a dimension; empty for a number."""
    return set() if isinstance(size, int) else set(size._get_vars())


def size_of(size: Any, sizes: Mapping[str, int]) -> int:
    """Returns the size of a dimension for these values of its names."""
    return size if isinstance(size, int) else int(size._evaluate(sizes))


def refine_shapes(code: bytes) -> bytes:
    """Refines a module whose `main` has static argument shapes to static shapes throughout.

    Raises an exception of XLA if that fails, also for shapes that the program does not allow.
    """
    return _jax.mlir.refine_polymorphic_shapes(
        mlir_module=code,
        enable_shape_assertions=True,
        validate_static_shapes=True,
        enable_shardy=True,
    )


def key_implementation(dtype: Any) -> tuple[str, tuple[int, ...]] | None:
    """Returns the name of a PRNG key dtype's implementation, and the shape of a key's 32-bit words.

    None for any other dtype.
    """
    import jax

    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):  # pyright: ignore[reportPrivateImportUsage]
        return None
    return dtype._impl.name, tuple(dtype._impl.key_shape)


def lowered_devices(lowered: Any) -> tuple[Any, ...]:
    """Returns the devices of a `jax.stages.Lowered`, in order."""
    return tuple(lowered._lowering._device_list)


def static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the static arguments of a `jax.jit` function, by position and by name.

    jax infers each from the other. A negative position counts from a call's last argument.
    """
    return jitted._jit_info.static_argnums, jitted._jit_info.static_argnames


def at_top_level() -> bool:
    """Returns True if no trace, differentiation or mapping is active."""
    from jax._src import core

    return core.trace_state_clean()


def as_call(traced: Any) -> tuple[Any, list[Any]]:
    """Returns a jaxpr with one equation, the call of a traced `jax.jit` function.

    The equation keeps shardings and donations. Also returns the tracers that the function closes
    over, which it takes before its arguments.
    """
    import jax
    from jax._src.pjit import jit_p

    jaxpr = jax.make_jaxpr(partial(jit_p.bind, **traced._params))(*traced.jaxpr.in_avals)
    return jaxpr, list(traced._consts)


def as_jitted(call: Any) -> Any:
    """Reverses `as_call`, also for programs that jax derived from one.

    Returns a jitted function of flat arguments that returns a tuple. It donates nothing, as a
    derived program's arguments can be its residuals.
    """
    import jax
    from jax._src.core import jaxpr_as_fun
    from jax._src.pjit import jit_p

    equation = call.eqns[0] if len(call.eqns) == 1 else None
    params: dict[str, Any] = {}
    if (
        equation is not None
        and equation.primitive is jit_p
        and (list(equation.invars), list(equation.outvars)) == (call.invars, call.outvars)
    ):
        call = equation.params["jaxpr"]
        params = {side: equation.params[side] for side in ("in_shardings", "out_shardings")}
    function = jaxpr_as_fun(call)

    def flat(*leaves: Any) -> Any:
        return tuple(function(*leaves))

    flat.__name__ = flat.__qualname__ = "derived" if equation is None else equation.params["name"]
    return jax.jit(flat, **params)


def python_callbacks(jaxpr: Any) -> list[tuple[str, str | None, int, str]]:
    """Returns the ops of a jaxpr that call Python at run time: the user's function such as
    `jax.debug.print`, and the file, line and function of that call."""
    from jax._src import core, source_info_util

    found: list[tuple[str, str | None, int, str]] = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _CALLBACKS:
            frame = source_info_util.user_frame(equation.source_info.traceback)
            called = _CALLBACKS[name]
            if frame is None:
                found.append((called, None, 0, ""))
            else:
                found.append((called, frame.file_name, frame.start_line, frame.function_name))
        for inner in core.jaxprs_in_params(equation.params):
            found += python_callbacks(inner)
    return found


def described_devices(platform: str, name: str, config: str = "") -> list[Any]:
    """Returns the devices of a machine that is described, not present: platform `cuda` or `tpu`.

    `config` is a GpuTargetConfigProto in text form. Raises an exception of jax if it is invalid.
    """
    from jax.experimental import topologies

    if platform == "tpu":
        return list(topologies.get_topology_desc(name, platform).devices)
    described = topologies.get_topology_desc(
        "described", platform, topology=name, target_config=config
    )
    return list(described.devices)


def compile_ahead_of_time(
    module: ir.Module,
    replicas: int,
    partitions: int,
    devices: list[Any],
    *,
    tuple_arguments: bool,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, dict[str, int]]:
    """Compiles for present or described devices; returns the scheduled HLO and bytes per device.

    `tuple_arguments` passes main's arguments as one tuple, as jax does for long lists on TPU.
    `options` are XLA's, by name. Raises an exception of XLA, or ends the process.
    """
    settings = _compile_options(replicas, partitions, devices, env_options_overrides=dict(options))
    _let_gspmd_divide_its_own(settings, write_bytecode(module))
    settings.parameter_is_tupled_arguments = tuple_arguments
    client = devices[0].client
    described = isinstance(client, _jax.CompileOnlyPyClient)
    compiler = client.compile if described else client.compile_and_load
    executable = compiler(module, _jax.DeviceList(tuple(devices)), settings)
    stats = executable.get_compiled_memory_stats()
    in_host = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes
    in_host -= stats.host_alias_size_in_bytes
    memory = {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
        "peak_bytes": max(stats.peak_memory_in_bytes - in_host, 0),  # jaxlib counts all arguments
    }
    return executable.hlo_modules()[0].to_string(), memory
