"""Random programs for eight devices with collectives of one kind that can be merged."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

DEVICES = 8
MESH = (("x", 2), ("y", 4))
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")
TYPES: dict[str, Any] = {
    "f32": np.float32,
    "bf16": jax.numpy.bfloat16,
    "f64": np.float64,
    "f16": np.float16,
    "i32": np.int32,
    "ui8": np.uint8,
    "i16": np.int16,
    "f8E4M3FN": jax.numpy.float8_e4m3fn,
}
ALONE: dict[str, Any] = {"i1": np.bool_, "complex<f32>": np.complex64}
REDUCERS = ("add", "maximum", "minimum", "multiply")
GROUPS = {  # by mesh axes: the same groups in dense form
    "x": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "y": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "x, y": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "y, x": [[0, 4, 1, 5, 2, 6, 3, 7]],
    "": [[0], [1], [2], [3], [4], [5], [6], [7]],
}


@dataclass
class Program:
    """A program in the making. `form`: replicas, partitions, or a manual computation over them."""

    rng: np.random.Generator
    form: str
    kind: str
    arguments: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])
    results: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def replicas(self) -> int:
        return DEVICES if self.form == "replicas" else 1

    def pick[T](self, options: list[T] | tuple[T, ...]) -> T:
        return options[int(self.rng.integers(len(options)))]

    def line(self, text: str) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def argument(self, kind: str) -> str:
        self.arguments.append(kind)
        return f"%a{len(self.arguments) - 1}"

    def text(self) -> str:
        """The module."""
        taken = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(self.arguments))
        given = ", ".join(kind for _, kind in self.results)
        names = ", ".join(name for name, _ in self.results)
        lines = "\n".join(self.lines)
        counts = f"mhlo.num_replicas = {self.replicas} : i32"
        counts += f", mhlo.num_partitions = {DEVICES // self.replicas} : i32"
        body = f"{lines}\nreturn {names} : {given}"
        if self.form == "manual":
            body = self._manual(lines, names, given)
        mesh = ", ".join(f'"{name}"={size}' for name, size in MESH)
        return (
            f"module attributes {{{counts}}} {{\nsdy.mesh @mesh = <[{mesh}]>\n"
            f"func.func @main({taken}) -> ({given}) {{\n{body}\n}}\n}}\n"
        )

    def _manual(self, lines: str, names: str, given: str) -> str:
        """The body in a manual computation in which nothing is sharded."""

        def whole(kinds: list[str]) -> str:
            dims = [", ".join(["{}"] * len(split(kind)[0])) for kind in kinds]
            return "[" + ", ".join(f"<@mesh, [{each}]>" for each in dims) + "]"

        outputs = [kind for _, kind in self.results]
        taken = ", ".join(f"%a{i}" for i in range(len(self.arguments)))
        inner = ", ".join(f"%m{i}: {kind}" for i, kind in enumerate(self.arguments))
        kinds = ", ".join(self.arguments)
        count = f":{len(outputs)}" if len(outputs) > 1 else ""
        returned = ", ".join(f"%r#{i}" if count else "%r" for i in range(len(outputs)))
        return (
            f"%r{count} = sdy.manual_computation({taken}) in_shardings={whole(self.arguments)} "
            f'out_shardings={whole(outputs)} manual_axes={{"x", "y"}} ({inner}) {{\n'
            f"{lines.replace('%a', '%m')}\nsdy.return {names} : {given}\n}}"
            f" : ({kinds}) -> ({given})\nreturn {returned} : {given}"
        )


def tensor(shape: list[int], element: str) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def split(kind: str) -> tuple[list[int], str]:
    """The shape and the element type of a tensor."""
    found = re.fullmatch(r"tensor<((?:\d+x)*)(.+)>", kind)
    assert found is not None, kind
    return [int(size) for size in found.group(1).split("x")[:-1]], found.group(2)


def random_program(seed: int) -> Program:
    """Two to five collectives of one kind that can become one, with ops between them."""
    rng = np.random.default_rng(seed)
    form = ("replicas", "partitions", "manual")[int(rng.integers(3))]
    program = Program(rng, form, KINDS[seed % len(KINDS)])
    axes = program.pick(list(GROUPS))
    reducer = program.pick(REDUCERS)
    elements = list(TYPES) if program.kind not in ("all_reduce", "reduce_scatter") else []
    single = program.pick(["f32", "f32", "bf16", "i32", "f64", *ALONE])
    if reducer in ("maximum", "minimum") and single == "complex<f32>":
        single = "f32"
    is_mixed = bool(elements) and rng.random() < 0.6
    common = [int(size) for size in rng.integers(1, 5, int(rng.integers(1, 4)))]
    kept = int(rng.integers(len(common) + 1))  # dimensions that all share, at the end
    dimension = int(rng.integers(0, len(common)))
    pairs = _pairs(rng)
    for _ in range(int(rng.integers(2, 6))):
        element = program.pick(elements) if is_mixed else single
        lead = [int(size) for size in rng.integers(1, 5, int(rng.integers(1, 3)))]
        shape = [*lead, *common[kept:]] if rng.random() < 0.7 else list(common)
        if seed % 4 == 0:  # rows of 128, in which vectors and what shares no dimension are joined
            shape = [128 * lead[0], *lead[1:]]
        if rng.random() < 0.05 and program.kind in ("all_reduce", "collective_permute"):
            shape[0] = 0
        _collective(program, shape, element, axes, reducer, pairs, dimension)
    return program


def _pairs(rng: np.random.Generator) -> str:
    targets = rng.permutation(DEVICES)
    pairs = [[i, int(t)] for i, t in enumerate(targets) if rng.random() < 0.8] or [[0, 1]]
    return f"dense<{pairs}> : tensor<{len(pairs)}x2xi64>"


def _collective(
    program: Program,
    shape: list[int],
    element: str,
    axes: str,
    reducer: str,
    pairs: str,
    wished: int,
) -> None:
    kind, rng = program.kind, program.rng
    size = len(GROUPS[axes][0])
    cut = min(wished, len(shape) - 1) if rng.random() < 0.5 else int(rng.integers(len(shape)))
    joined = int(rng.integers(len(shape)))
    taken, given = list(shape), list(shape)
    attributes: list[str] = []
    if kind == "all_gather":
        given[cut] *= size
        attributes.append(f"all_gather_dim = {cut} : i64")
    elif kind == "reduce_scatter":
        taken[cut] *= size
        attributes.append(f"scatter_dimension = {cut} : i64")
    elif kind == "all_to_all":
        taken[cut] *= size
        given = list(shape)
        given[joined] *= size
        attributes.append(f"split_dimension = {cut} : i64, concat_dimension = {joined} : i64")
        attributes.append(f"split_count = {size} : i64")
    attributes.append(
        f"source_target_pairs = {pairs}"
        if kind == "collective_permute"
        else f"replica_groups = {_groups(program, axes)}"
    )
    if program.form != "replicas":
        handle = program.pick([1, 2, 7])
        attributes.append(
            f"channel_handle = #stablehlo.channel_handle<handle = {handle}, type = 1>"
        )
        if kind in ("all_gather", "reduce_scatter", "all_reduce"):
            attributes.append("use_global_device_ids")
    operand, kind_in = _operand(program, tensor(taken, element)), tensor(taken, element)
    region = ""
    if kind in ("all_reduce", "reduce_scatter"):
        scalar = f"tensor<{element}>"
        region = (
            f"({{\n^bb0(%l: {scalar}, %r: {scalar}):\n%c = stablehlo.{reducer} %l, %r : {scalar}\n"
            f"stablehlo.return %c : {scalar}\n}}) "
        )
    out = tensor(given, element)
    value = program.line(
        f'"stablehlo.{kind}"({operand}) {region}{{{", ".join(attributes)}}} : ({kind_in}) -> {out}'
    )
    program.results.append((value, out))
    if rng.random() < 0.5:  # a user, and one of its own, before the next collective
        user = program.line(
            f"stablehlo.reshape {value} : ({out}) -> {tensor([math.prod(given)], element)}"
        )
        again = program.line(
            f"stablehlo.reverse {user}, dims = [0] : {tensor([math.prod(given)], element)}"
        )
        program.results.append((again, tensor([math.prod(given)], element)))


def _groups(program: Program, axes: str) -> str:
    """The groups in dense form, in any order, or by mesh axes."""
    if axes and program.rng.random() < 0.5 and program.kind != "all_to_all":
        listed = ", ".join(f'#stablehlo.axis_ref<name = "{name}">' for name in axes.split(", "))
        return f"#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [{listed}]>"
    rows = [GROUPS[axes][i] for i in program.rng.permutation(len(GROUPS[axes]))]
    return f"dense<{rows}> : tensor<{len(rows)}x{len(rows[0])}xi64>"


def _operand(program: Program, kind: str) -> str:
    """An argument, or something that is computed from one just before."""
    value = program.argument(kind)
    if program.rng.random() < 0.5:
        return value
    dims = list(range(len(split(kind)[0])))
    return program.line(f"stablehlo.reverse {value}, dims = {dims} : {kind}")


def arguments(program: Program, seed: int) -> list[list[Any]]:
    """Any bits where they are only moved, NaN and infinities among them; else small numbers."""
    rng = np.random.default_rng(seed)
    return [[_values(program, kind, rng) for _ in range(DEVICES)] for kind in program.arguments]


def _values(program: Program, kind: str, rng: np.random.Generator) -> Any:
    shape, element = split(kind)
    dtype = np.dtype({**TYPES, **ALONE}[element])
    if program.kind in ("all_reduce", "reduce_scatter") or element == "i1":
        return rng.integers(0, 3, shape).astype(dtype)
    data = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    values = data.view(dtype).reshape(shape)
    if element == "bf16":  # XLA:CPU makes them floats and back, to a NaN of its own
        values = np.where(np.isnan(values), dtype.type(np.nan), values)
    return values


def text_of_two_gathers(one: str, other: str) -> str:
    """Two all_gathers over all devices of four elements each, of these types."""
    program = Program(np.random.default_rng(0), "partitions", "all_gather")
    groups = f"dense<{[list(range(DEVICES))]}> : tensor<1x{DEVICES}xi64>"
    for element in (one, other):
        taken, given = tensor([4], element), tensor([4 * DEVICES], element)
        value = program.line(
            f'"stablehlo.all_gather"({program.argument(taken)}) {{all_gather_dim = 0 : i64, '
            f"replica_groups = {groups}, use_global_device_ids, "
            "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>} "
            f": ({taken}) -> {given}"
        )
        program.results.append((value, given))
    return program.text()
