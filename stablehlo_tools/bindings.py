# pyright: basic
"""The only module that imports jaxlib's MLIR bindings or the internals of jax.

Everything else takes `ir` and these functions from here, so that a change in jaxlib is answered
in one file. Importing it loads jaxlib's MLIR libraries (about a quarter of a second) and not jax.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jaxlib._jax as _jax
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir._mlir_libs._mlir import rewrite

# Always through the dialects' own modules: an extension module (`_sdy`, …) that is imported first
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
    """An MLIR context that knows the dialects of a jax.export artifact, and no others."""
    context = ir.Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)  # func among them
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
    """Makes `!quant.…` types known to the context.

    No binding registers their dialect, and jaxlib's parser crashes on some of them without it; the
    reader of portable artifacts loads it into any context that it is given.
    """
    empty = serialize_portable_artifact(parse_module("module {}", context))
    deserialize_portable_artifact(empty, context)


def portable_version(data: bytes) -> str | None:
    """The StableHLO version of a portable artifact, or None for any other bytes."""
    if not data.startswith(BYTECODE_MAGIC):
        return None
    # The producer string follows the magic and the bytecode version, a short varint.
    match = _PORTABLE_PRODUCER.search(data[:64])
    return match.group(1).decode() if match else None


def parse_module(data: str | bytes, context: ir.Context) -> ir.Module:
    """Parses MLIR text or MLIR bytecode and verifies it. Raises `ir.MLIRError`."""
    with context:
        return ir.Module.parse(data)


def deserialize_portable_artifact(data: bytes, context: ir.Context) -> ir.Module:
    """Reads a StableHLO portable artifact. Raises an exception of jaxlib's choosing."""
    with context:
        return _jax.mlir.deserialize_portable_artifact(data)


def serialize_portable_artifact(module: ir.Module, version: str | None = None) -> bytes:
    """Writes a portable artifact, of modules that hold `sdy` ops too.

    Without a version it is the one that jax.export itself targets: readable by every StableHLO
    of the last four weeks.
    """
    return _jax.mlir.serialize_portable_artifact(module, version or export_version(), True)


def dot_dimension_numbers(attribute: ir.Attribute) -> Any:
    """The dimensions of a matrix product, of StableHLO's or MHLO's."""
    own = stablehlo.DotDimensionNumbers.isinstance(attribute)
    return (stablehlo if own else mhlo).DotDimensionNumbers(attribute)


def conv_dimension_numbers(attribute: ir.Attribute) -> Any:
    """The dimensions of a convolution, of StableHLO's or MHLO's."""
    own = stablehlo.ConvDimensionNumbers.isinstance(attribute)
    return (stablehlo if own else mhlo).ConvDimensionNumbers(attribute)


def export_version() -> str:
    """The StableHLO version that jax.export targets."""
    return stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_4
    )


def current_version() -> str:
    """The newest StableHLO version that this jaxlib can write."""
    return stablehlo.get_current_version()


def write_bytecode(module: ir.Module) -> bytes:
    """The module as plain MLIR bytecode."""
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def parse_pass_pipeline(text: str, context: ir.Context) -> PassManager:
    """A pass manager of registered C++ passes. Raises ValueError where MLIR knows none."""
    with context:
        return PassManager.parse(text)


def register_interpreter_dialect(context: ir.Context) -> None:
    """Makes `interpreter.*` ops known to the context (needed by `eval_module`)."""
    stablehlo.register_interpreter_dialect(context)


def eval_module(module: ir.Module, arguments: list[Any]) -> list[Any]:
    """Runs a module in the StableHLO reference interpreter."""
    return stablehlo.eval_module(module, arguments)


@dataclass(frozen=True)
class ExportedEnvelope:
    """What a jax.export file says of itself, whether this jax reads the rest of it or not."""

    serialization_version: int
    jax_version: str
    before_0_8_2: bool
    module: bytes


def exported_envelope(data: bytes) -> ExportedEnvelope:
    """Reads no more than the envelope. Raises whatever damaged bytes lead flatbuffers to."""
    from jax._src.export import serialization_generated

    exported = serialization_generated.Exported.GetRootAsExported(bytearray(data))
    return ExportedEnvelope(
        exported.SerializationVersion(),
        (exported.JaxVersion() or b"").decode(),
        # The number of devices has had 32 bits, in another field, since that release.
        exported.NrDevices() == 0 and exported.NrDevicesShort() > 0,
        # An array, or the number 0 where there is none, as flatbuffers has it.
        bytes(exported.MlirModuleSerializedAsNumpy()),  # pyright: ignore[reportArgumentType]
    )


def newest_serialization_version() -> int:
    """The newest format of jax.export files that this jax reads."""
    from jax._src.export import serialization

    return serialization._SERIALIZATION_VERSION


# Passes of XLA:CPU that move an op into another kernel, or rewrite it into one that rounds
# otherwise; to name in xla_disable_hlo_passes.
REROUNDING_PASSES = ("algsimp", "fusion", "small-while-loop-hoisting")
# Those that may also take away what tells two programs apart. Without fusion, which only rounds,
# compiling takes several times as long.
SIMPLIFYING_PASSES = ("algsimp", "small-while-loop-hoisting")
# The first of them also makes programs out of what XLA:CPU has no kernel for.
INDISPENSABLE_PASSES = ("algsimp",)


def compile_for_devices(
    code: bytes,
    replicas: int,
    partitions: int,
    devices: list[Any],
    *,
    partitioned: bool,
    skipped_passes: Sequence[str] = (),
) -> Any:
    """Compiles MLIR bytecode with the devices' own backend: replica r's partition p on the device
    at `r * partitions + p` in the list.

    Where `partitioned`, XLA's partitioner divides the module by its shardings. Otherwise the
    module is what each device runs already, and the partitioner is kept away from it: it refuses
    `partition_id`. XLA runs none of `skipped_passes`. It is to be given arrays that lie on the
    devices, also where the module wants some in the host's memory. Raises an exception of XLA's
    choosing.
    """
    import numpy as np
    from jax._src.compiler import get_compile_options
    from jax._src.lax.linalg import initialize_lapack

    if b"lapack_" in code:  # these kernels are null pointers until jax has lowered one itself
        initialize_lapack()
    # Ids need not be 0, 1, 2 …: not where the devices are spread over processes.
    assignment = np.array([device.id for device in devices]).reshape(replicas, partitions)
    options = get_compile_options(replicas, partitions, assignment)
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
    """A module whose arguments and results lie where the devices are: XLA:CPU ends the process, or
    waits for ever, when it is given others than it was compiled for."""
    if _MEMORY_KIND.encode() not in code:
        return code
    module = parse_module(code, new_context())
    for op in module.body.operations:
        for side in ("arg_attrs", "res_attrs"):
            if side in op.attributes:
                entries = [
                    {
                        each.name: each.attr
                        for each in ir.DictAttr(entry)
                        if each.name != _MEMORY_KIND
                    }
                    for entry in ir.ArrayAttr(op.attributes[side])
                ]
                op.attributes[side] = ir.ArrayAttr.get(
                    [ir.DictAttr.get(entry, module.context) for entry in entries], module.context
                )
    return write_bytecode(module)


def compile_kept(code: bytes, devices: list[Any]) -> Any:
    """What `compile_for_devices` makes of a program of one device for devices as partitions; kept
    in, and taken from, jax's compilation cache where there is one (`jax_compilation_cache_dir`).

    By content, on every process: jax itself keeps what process 0 compiles.
    """
    import hashlib
    import time

    import numpy as np
    from jax._src import compilation_cache as cache
    from jax._src.compiler import get_compile_options

    client, listed = devices[0].client, _jax.DeviceList(tuple(devices))
    if not cache.is_cache_used(client):
        return compile_for_devices(code, 1, len(devices), devices, partitioned=False)
    said = [str(client.platform_version), jaxlib_version, os.environ.get("XLA_FLAGS", "")]
    said += [str(device.id) for device in devices] + [str(devices[0].device_kind)]
    key = f"stablehlo-tools-{hashlib.sha256(code + repr(said).encode()).hexdigest()}"
    assignment = np.array([[device.id for device in devices]])
    options = get_compile_options(1, len(devices), assignment)
    found, _ = cache.get_executable_and_time(key, options, client, listed)
    if found is None:
        began = time.monotonic()
        found = compile_for_devices(code, 1, len(devices), devices, partitioned=False)
        taken = int(time.monotonic() - began)
        cache.put_executable_and_time(key, "main", found, client, taken)
    return found


def coordinator_address() -> str:
    """Where the coordinator of `jax.distributed` listens; "" without one."""
    from jax._src.distributed import global_state

    return global_state.coordinator_address or ""


def coordination_client() -> Any:
    """The client of `jax.distributed` in this process, which has a key-value store."""
    from jax._src.distributed import global_state

    return global_state.client


_OF_SHARDY = (b"sdy.sharding", b"sharding_constraint", b"manual_computation")


def _let_gspmd_divide_its_own(options: Any, code: bytes) -> None:
    """Keeps Shardy away from a module with GSPMD's shardings alone: XLA turns them into Shardy's
    for it and ends the process on some, `{devices=[4,1,2]<=[8]}` of an argument among them."""
    if b"mhlo.sharding" in code and not any(word in code for word in _OF_SHARDY):
        options.executable_build_options.use_shardy_partitioner = False


def run_on_devices(executable: Any, arguments: list[list[Any]], devices: list[Any]) -> Any:
    """Runs what `compile_for_devices` returned: `arguments[i][d]` is input i's NumPy array on
    device d; returns NumPy arrays `[output][d]`. Inputs are copied, so donation cannot harm them.
    """
    import jax
    import numpy as np

    whole = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("device",)), jax.sharding.PartitionSpec()
    )

    def placed(parts: list[Any]) -> Any:
        # "Replicated" with other contents on each device: the only form that holds any values.
        on_devices = [
            jax.device_put(np.array(part), device)
            for part, device in zip(parts, devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(parts[0].shape, whole, on_devices)

    results = executable.execute_sharded([placed(parts) for parts in arguments])
    outputs = results.disassemble_into_single_device_arrays()
    return [[np.asarray(part) for part in parts] for parts in outputs]


_HOST_CALLS: dict[str, Any] = {}  # what XLA calls must not be collected


def register_host_call(target: str, function: Callable[[int, Any], None]) -> None:
    """Lets XLA:CPU call a Python function where a program has a custom call of this target, with
    the addresses of the result (of a table of them, if there are several) and of the operands.

    A function that raises ends the process: the program has no other way to fail.
    """
    import ctypes
    import traceback

    import jax

    if target in _HOST_CALLS:
        return
    type_ = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))

    def guarded(out: int, operands: Any) -> None:
        try:
            function(out, operands)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    _HOST_CALLS[target] = type_(guarded)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    address = ctypes.cast(_HOST_CALLS[target], ctypes.c_void_p)
    made = capsule(address, b"xla._CUSTOM_CALL_TARGET", None)
    jax.ffi.register_ffi_target(target, made, platform="cpu", api_version=0)


def hlo_text_to_stablehlo(text: str) -> bytes:
    """HLO text as a StableHLO module in MLIR bytecode. Raises an exception of XLA's choosing."""
    return hlo_proto_to_stablehlo(hlo_text_to_proto(text))


def hlo_text_to_proto(text: str) -> bytes:
    """HLO text as a serialized HloModuleProto. Raises an exception of XLA's choosing."""
    from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def hlo_proto_to_stablehlo(module: bytes) -> bytes:
    """A serialized HloModuleProto as a StableHLO module in MLIR bytecode. Raises as above."""
    from jax.extend.mlir import hlo_to_stablehlo

    return hlo_to_stablehlo(module)


def hlo_sharding_text(data: bytes) -> str:
    """A serialized OpSharding as text. Raises a ValueError for bytes that are none."""
    import jaxlib._hlo as _hlo

    sharding = _hlo.OpSharding()
    sharding.ParseFromString(data)
    if not data or sharding.SerializeToString() != data:  # other bytes read as `{replicated}`
        raise ValueError(f"{data!r} is not a sharding that is known here")
    try:
        return _hlo.HloSharding.from_proto(sharding).to_string()
    except Exception as error:
        raise ValueError(f"XLA takes no such sharding: {error}") from None


def input_shardings(executable: Any) -> list[Any] | None:
    """Each input's sharding for `shard_indices`; None where the executable has none."""
    return executable.get_parameter_shardings()


def output_shardings(executable: Any) -> list[Any] | None:
    """Each output's sharding for `shard_indices`; None where the executable has none."""
    return executable.get_output_shardings()


def shard_indices(
    sharding: Any, shape: tuple[int, ...], partitions: int
) -> list[tuple[slice, ...]]:
    """The part of a global array that each partition holds, as slices for NumPy.

    Raises AssertionError where the sharding does not divide the shape evenly.
    """
    import jaxlib._hlo as _hlo
    from jax._src.op_shardings import op_sharding_to_indices

    sharding = _hlo.HloSharding.from_proto(sharding)
    return list(op_sharding_to_indices(sharding, shape, partitions))


def size_names(size: Any) -> set[str]:
    """The names in the size of a dimension: none in a number."""
    return set() if isinstance(size, int) else set(size._get_vars())


def size_of(size: Any, sizes: Mapping[str, int]) -> int:
    """The size of a dimension, where the names in it have these sizes."""
    return size if isinstance(size, int) else int(size._evaluate(sizes))


def refine_shapes(code: bytes) -> bytes:
    """A module whose `main` takes static shapes, with static shapes throughout.

    Raises an exception of XLA's choosing, for shapes that the program does not allow, too.
    """
    return _jax.mlir.refine_polymorphic_shapes(
        mlir_module=code,
        enable_shape_assertions=True,
        validate_static_shapes=True,
        enable_shardy=True,
    )


def key_implementation(dtype: Any) -> tuple[str, tuple[int, ...]] | None:
    """The name of a PRNG key dtype's implementation, and the shape of one key's 32-bit words.

    None for any other dtype.
    """
    import jax

    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):  # pyright: ignore[reportPrivateImportUsage]
        return None
    return dtype._impl.name, tuple(dtype._impl.key_shape)


def lowered_devices(lowered: Any) -> tuple[Any, ...]:
    """The devices, in their order, that a `jax.stages.Lowered` is meant for."""
    return tuple(lowered._lowering._device_list)


def static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The static arguments of what `jax.jit` made, by position and by name, each inferred from the
    other; a negative position counts from the last argument of a call."""
    return jitted._jit_info.static_argnums, jitted._jit_info.static_argnames


def at_top_level() -> bool:
    """Whether nothing is being traced, differentiated or mapped at the moment."""
    from jax._src import core

    return core.trace_state_clean()


def as_call(traced: Any) -> tuple[Any, list[Any]]:
    """A jaxpr whose one equation calls what `jax.jit` traced, with its shardings and donations; and
    the tracers from around the function, which it takes in front of its arguments."""
    import jax
    from jax._src.pjit import jit_p

    jaxpr = jax.make_jaxpr(partial(jit_p.bind, **traced._params))(*traced.jaxpr.in_avals)
    return jaxpr, list(traced._consts)


def as_jitted(call: Any) -> Any:
    """The reverse of `as_call`, also of what jax has derived from one: a jitted function of flat
    arguments that gives a tuple. It donates nothing: a derived program's arguments can be its
    residuals."""
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
    """The ops of a jaxpr that call Python when they run: what the user called, and the file, line
    and function that it stands in."""
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
    """The devices of a machine that is described, not present: platform `cuda` or `tpu`.

    `config` is a GpuTargetConfigProto in text form. Raises an exception of jax's choosing.
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
    """Compiles for present or described devices: the scheduled HLO text and the bytes per device.

    `tuple_arguments` passes main's arguments as one tuple, as jax does for long lists on TPU.
    `options` are XLA's, by name.
    Raises an exception of XLA's choosing, or ends the process.
    """
    import numpy as np
    from jax._src.compiler import get_compile_options

    assignment = np.array([device.id for device in devices]).reshape(replicas, partitions)
    settings = get_compile_options(
        replicas, partitions, assignment, env_options_overrides=dict(options)
    )
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
