"""Loops on eight devices with collectives that may run once after them, as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.ir.inline import inline_all_calls
from stablehlo_tools.transforms.parts.pipeline_collectives.movable_collectives import (
    LoopSurvey,
    loops_of,
    survey_loop,
)
from stablehlo_tools.transforms.parts.pipeline_collectives.sinking.sink_plan import (
    Sinking,
    merge_sunk,
    sinkings,
    write_sinkings,
)

DEVICES = 8
Array = np.ndarray[Any, Any]
_ALL = "dense<[[0, 1, 2, 3, 4, 5, 6, 7]]> : tensor<1x8xi64>"
_FOURS = "dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>"
_SUM = """({
  ^bb0(%left: tensor<E>, %right: tensor<E>):
    %both = stablehlo.KIND %left, %right : tensor<E>
    stablehlo.return %both : tensor<E>
}) """


def collective(
    name: str,
    operand: str,
    taken: str,
    given: str,
    attributes: str = "",
    *,
    kind: str = "add",
    fours: bool = False,
) -> str:
    """A collective of all devices, or of the first four and the last four."""
    element = taken.rsplit("x", 1)[-1]
    reduces = name in ("all_reduce", "reduce_scatter")
    region = _SUM.replace("E>", f"{element}>").replace("KIND", kind) if reduces else ""
    groups = f"replica_groups = {_FOURS if fours else _ALL}"
    if name == "collective_permute":
        groups = "source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [4, 0]]> : tensor<4x2xi64>"
    listed = [groups, "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"]
    if name in ("all_reduce", "reduce_scatter", "all_gather"):
        listed.append("use_global_device_ids")
    listed += [attributes] if attributes else []
    types = f"(tensor<{taken}>) -> tensor<{given}>"
    # The dictionary comes before a region in the generic form of StableHLO's printer, or after it.
    return f'"stablehlo.{name}"({operand}) {region}{{{", ".join(listed)}}} : {types}'


def all_reduce(operand: str, kind: str, op: str = "add", *, fours: bool = False) -> str:
    """An all_reduce of a tensor type."""
    return collective("all_reduce", operand, kind, kind, kind=op, fours=fours)


def loop(
    carries: Mapping[str, str],
    body: str,
    ends: Sequence[str],
    *,
    trips: int | None = 3,
    start: int = 0,
    condition: str = "",
) -> str:
    """A module whose function takes the carries but for the counter `%i`, and returns them.

    Where `trips` is None the function takes `%bound`, too. The constants `%c0`, `%c1` and
    `%last` (one less than the bound) stand before the loop.
    """
    names, kinds = list(carries), [f"tensor<{kind}>" for kind in carries.values()]
    taken = [f"%{name}0: {kind}" for name, kind in zip(names, kinds, strict=True)]
    taken += ["%bound: tensor<i32>"] if trips is None else []
    known = (
        "" if trips is None else f"%bound = stablehlo.constant dense<{start + trips}> : tensor<i32>"
    )
    starts = ", ".join([f"%i = %c{start}", *(f"%{name} = %{name}0" for name in names)])
    results = ", ".join(f"%r#{i + 1}" for i in range(len(names)))
    types = ", ".join(["tensor<i32>", *kinds])
    given = ", ".join(kinds)
    extra = (
        "" if start in (0, 1) else f"%c{start} = stablehlo.constant dense<{start}> : tensor<i32>"
    )
    default = "%go = stablehlo.compare LT, %i, %bound : (tensor<i32>, tensor<i32>) -> tensor<i1>"
    return f"""module attributes {{mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32}} {{
func.func @main({", ".join(taken)}) -> ({given}) {{
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  {extra}
  {known}
  %last = stablehlo.subtract %bound, %c1 : tensor<i32>
  %r:{len(names) + 1} = stablehlo.while({starts}) : {types} cond {{
    {condition}
    {default if "%go" not in condition else ""}
    stablehlo.return %go : tensor<i1>
  }} do {{
    {body}
    %i1 = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return {", ".join(["%i1", *ends])} : {types}
  }}
  return {results} : {given}
}}
}}
"""


def reverse(trips: int) -> str:
    """`%idx`: the rows from the last to the first, in the words that jax has for `xs[-1 - i]`."""
    return f"""
    %size = stablehlo.constant dense<{trips}> : tensor<i32>
    %minus1 = stablehlo.constant dense<-1> : tensor<i32>
    %wrapped = stablehlo.constant dense<{trips - 1}> : tensor<i32>
    %s = stablehlo.subtract %size, %i : tensor<i32>
    %a = stablehlo.add %s, %minus1 : tensor<i32>
    %b = stablehlo.add %s, %wrapped : tensor<i32>
    %below = stablehlo.compare LT, %a, %c0 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %idx = stablehlo.select %below, %b, %a : tensor<i1>, tensor<i32>
    """


def row(of: str, name: str, kind: str, trips: int, at: str = "%idx") -> str:
    """A row of a stacked value, with its first dimension of size 1."""
    sizes = kind.split("x")[:-1]
    rank = len(sizes)
    shape = ", ".join(["1", *sizes])
    zeros = ", ".join([at] + ["%c0"] * rank)
    starts = ", ".join(["tensor<i32>"] * (rank + 1))
    whole, part = f"tensor<{trips}x{kind}>", f"tensor<1x{kind}>"
    return (
        f"{name} = stablehlo.dynamic_slice {of}, {zeros}, sizes = [{shape}] : "
        f"({whole}, {starts}) -> {part}\n"
    )


def store(into: str, value: str, name: str, kind: str, trips: int, at: str = "%idx") -> str:
    """The buffer with one row written."""
    rank = kind.count("x")
    zeros = ", ".join([at] + ["%c0"] * rank)
    starts = ", ".join(["tensor<i32>"] * (rank + 1))
    whole, part = f"tensor<{trips}x{kind}>", f"tensor<1x{kind}>"
    return (
        f"{name} = stablehlo.dynamic_update_slice {into}, {value}, {zeros} : "
        f"({whole}, {part}, {starts}) -> {whole}\n"
    )


def parsed(text: str) -> Artifact:
    """The module, verified."""
    program = artifact.parse(text.encode())
    program.module.operation.verify()
    return program


def surveyed(program: Artifact) -> list[LoopSurvey]:
    """All loops with their collectives, inner ones first."""
    with program.module.context:
        facts = ModuleFacts.from_module(program.module)
        return [survey_loop(found, program.module, facts) for found in loops_of(program.module)]


def planned(program: Artifact) -> list[Sinking | str]:
    """What can be done with each collective of the only loop."""
    found = surveyed(program)[-1]
    with program.module.context:
        plans = sinkings(found)
    return list(plans.values())


def sunk(
    program: Artifact, choose: Callable[[Sinking], bool] = lambda _: True, *, merge: bool = False
) -> Artifact:
    """A copy with all that can be sunk behind its loops, inner ones first."""
    result = program.copy()
    with result.module.context:
        inline_all_calls(result.module)
        for position in range(len(loops_of(result.module))):
            found = surveyed(result)[position]
            plans = sinkings(found)
            chosen = [p for p in plans.values() if isinstance(p, Sinking) and choose(p)]
            if not chosen:
                continue
            _, ops = write_sinkings(found.body, chosen)
            if merge:
                merge_sunk(result.module, ops)
    result.module.operation.verify()
    return result


def run(program: Artifact, values: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """`[output][device]` of `values[input][device]`."""
    devices = jax.devices()[:DEVICES]
    executable = bindings.compile_for_devices(
        bindings.write_bytecode(program.module), 1, DEVICES, devices, partitioned=False
    )
    with jax.enable_x64(True):
        results = bindings.run_on_devices(executable, [list(v) for v in values], devices)
    return [[np.asarray(part) for part in parts] for parts in results]


def arguments(program: Artifact, seed: int, bound: int | None = None) -> list[list[Array]]:
    """Small whole numbers, on each device others; `bound` for a last scalar argument."""
    rng = np.random.default_rng(seed)
    main = program.module.body.operations[0].operation
    kinds = [argument.type for argument in main.regions[0].blocks[0].arguments]
    drawn = [[_drawn(kind, rng) for _ in range(DEVICES)] for kind in kinds]
    if bound is not None:
        drawn[-1] = [np.asarray(bound, np.int32)] * DEVICES
    return drawn


def _drawn(kind: Any, rng: np.random.Generator) -> Array:
    name = str(kind.element_type)
    types = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": jax.numpy.bfloat16}
    types |= {"i64": np.int64, "i32": np.int32, "i16": np.int16, "i8": np.int8, "ui8": np.uint8}
    types |= {"i1": np.bool_, "complex<f32>": np.complex64}
    low = 0 if name in ("ui8", "i1") else -3
    return rng.integers(low, 2 if name == "i1" else 4, kind.shape).astype(types[name])


def same(one: list[list[Array]], other: list[list[Array]]) -> bool:
    """Whether all results are equal bit for bit."""
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )
