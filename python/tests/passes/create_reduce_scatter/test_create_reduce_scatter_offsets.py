"""The offsets of the random programs: each way to compute one is understood.

A program under construction, and scalars that say where each device's chunk starts: looked up in
tables, by slice or gather, scaled, selected, through a loop or a call.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.device_values import DeviceValues
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.ir.walk import functions_by_name, terminator

DEVICES = 8
WAYS = ("table", "scaled", "select", "loop", "call", "gather")


@dataclass
class Module:
    """A module in the making: its mesh of devices, lines, arguments and what it returns."""

    rng: random.Random
    replicas: int
    partitions: int
    axes: tuple[int, ...]
    ids: list[int]
    by_replica: bool  # groups are of replicas, with no channel; else of flattened ids
    lines: list[str] = field(default_factory=list[str])
    functions: list[str] = field(default_factory=list[str])
    arguments: list[str] = field(default_factory=list[str])
    results: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    expected: list[str] = field(default_factory=list[str])
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def line(self, text: str) -> str:
        """A line that makes a value; returns its name."""
        name = self.name()
        self.lines.append(f"    {name} = {text}")
        return name

    def argument(self, kind: str) -> str:
        self.arguments.append(kind)
        return f"%a{len(self.arguments) - 1}"

    def constant(self, value: object, kind: str) -> str:
        return self.line(f"stablehlo.constant dense<{value}> : {kind}")

    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """Where each device stands in the mesh."""
        places = list(np.ndindex(*self.axes))
        return dict(zip(self.ids, places, strict=True))

    def text(self) -> str:
        names = [name for name, _ in self.results]
        kinds = [kind for _, kind in self.results]
        arguments = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(self.arguments))
        mesh = ", ".join(f'"x{i}"={size}' for i, size in enumerate(self.axes))
        ids = "" if self.ids == list(range(DEVICES)) else f", device_ids={self.ids}"
        return "\n".join(
            [
                f"module attributes {{mhlo.num_replicas = {self.replicas} : i32, "
                f"mhlo.num_partitions = {self.partitions} : i32}} {{",
                f"  sdy.mesh @mesh = <[{mesh}]{ids}>",
                f"  func.func public @main({arguments}) -> ({', '.join(kinds)}) {{",
                *self.lines,
                f"    return {', '.join(names)} : {', '.join(kinds)}",
                "  }",
                *self.functions,
                "}",
            ]
        )


def tensor(shape: tuple[int, ...] | list[int], element: str) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def offsets(
    module: Module, chunks: list[int], size: int, cut: bool, unaligned: bool, how: str | None = None
) -> tuple[str, str]:
    """A scalar that is the start of each device's chunk, computed in one of many ways."""
    rng = module.rng
    if not cut:
        return module.constant(0, "tensor<i32>"), "i32"
    starts = [chunk * size + unaligned for chunk in chunks]
    device = device_id(module)
    how = how or rng.choice(WAYS)
    if how == "select":
        value = module.constant(starts[-1], "tensor<i32>")
        for d in range(DEVICES - 1):
            is_it = module.line(
                f"stablehlo.compare EQ, {device}, {module.constant(d, 'tensor<ui32>')}, UNSIGNED "
                ": (tensor<ui32>, tensor<ui32>) -> tensor<i1>"
            )
            there = module.constant(starts[d], "tensor<i32>")
            value = module.line(
                f"stablehlo.select {is_it}, {there}, {value} : tensor<i1>, tensor<i32>"
            )
        return value, "i32"
    if how == "scaled" and not unaligned:
        chunk = looked_up(module, chunks, device)
        return module.line(
            f"stablehlo.multiply {chunk}, {module.constant(size, 'tensor<i32>')} : tensor<i32>"
        ), "i32"
    start = (gathered if how == "gather" else looked_up)(module, starts, device)
    if how == "loop":
        start = carried(module, start)
    if how == "call":
        name = f"@same{module.count}"
        module.functions.append(
            f"  func.func private {name}(%x: tensor<i32>, %y: tensor<i32>) -> tensor<i32> {{\n"
            "    %z = stablehlo.maximum %x, %y : tensor<i32>\n    return %z : tensor<i32>\n  }"
        )
        zero = module.constant(0, "tensor<i32>")
        start = module.line(
            f"func.call {name}({start}, {zero}) : (tensor<i32>, tensor<i32>) -> tensor<i32>"
        )
    return start, "i32"


def device_id(module: Module) -> str:
    """The flattened id of the device."""
    partition = module.line("stablehlo.partition_id : tensor<ui32>")
    if module.replicas == 1:
        return partition
    replica = module.line("stablehlo.replica_id : tensor<ui32>")
    width = module.constant(module.partitions, "tensor<ui32>")
    base = module.line(f"stablehlo.multiply {replica}, {width} : tensor<ui32>")
    return module.line(f"stablehlo.add {base}, {partition} : tensor<ui32>")


def looked_up(module: Module, table: list[int], device: str) -> str:
    whole = module.constant(table, f"tensor<{DEVICES}xi32>")
    one = module.line(
        f"stablehlo.dynamic_slice {whole}, {device}, sizes = [1] : "
        f"(tensor<{DEVICES}xi32>, tensor<ui32>) -> tensor<1xi32>"
    )
    return module.line(f"stablehlo.reshape {one} : (tensor<1xi32>) -> tensor<i32>")


def gathered(module: Module, table: list[int], device: str) -> str:
    """A row of a table of two columns, and of that the second."""
    rows = [[7, entry] for entry in table]
    whole = module.constant(rows, f"tensor<{DEVICES}x2xi32>")
    index = module.line(f"stablehlo.reshape {device} : (tensor<ui32>) -> tensor<1xui32>")
    row = module.line(
        f'"stablehlo.gather"({whole}, {index}) {{dimension_numbers = #stablehlo.gather<offset_dims '
        "= [0], collapsed_slice_dims = [0], start_index_map = [0]>, slice_sizes = "
        f"array<i64: 1, 2>}} : (tensor<{DEVICES}x2xi32>, tensor<1xui32>) -> tensor<2xi32>"
    )
    last = module.line(f"stablehlo.slice {row} [1:2] : (tensor<2xi32>) -> tensor<1xi32>")
    return module.line(f"stablehlo.reshape {last} : (tensor<1xi32>) -> tensor<i32>")


def carried(module: Module, start: str) -> str:
    """The same through a loop that hands it on."""
    zero, three = module.constant(0, "tensor<i32>"), module.constant(3, "tensor<i32>")
    loop = module.name()
    module.lines += [
        f"    {loop}:2 = stablehlo.while(%i = {zero}, %c = {start}) : tensor<i32>, tensor<i32>",
        "      cond {",
        f"        %p = stablehlo.compare LT, %i, {three} : "
        "(tensor<i32>, tensor<i32>) -> tensor<i1>",
        "        stablehlo.return %p : tensor<i1>",
        "      } do {",
        f"        %n = stablehlo.add %i, {three} : tensor<i32>",
        "        stablehlo.return %n, %c : tensor<i32>, tensor<i32>",
        "      }",
    ]
    return f"{loop}#1"


def cast(module: Module, value: str, was: str, element: str) -> str:
    if was == element:
        return value
    return module.line(f"stablehlo.convert {value} : (tensor<{was}>) -> tensor<{element}>")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("replicas", "partitions"), [(1, 8), (8, 1), (2, 4)])
def test_offsets_are_understood(how: str, replicas: int, partitions: int):
    chunks = [3, 1, 0, 2, 2, 0, 1, 3]
    module = Module(random.Random(0), replicas, partitions, (8,), list(range(8)), False)
    value, element = offsets(module, chunks, 5, True, False, how)
    module.results.append((value, f"tensor<{element}>"))
    program = artifact.parse(module.text().encode())
    values = DeviceValues(program.module, ModuleFacts.from_module(program.module))
    main = functions_by_name(program.module)["main"]
    found = values.scalar(terminator(main.regions[0].blocks[0]).operands[0])
    assert found is not None
    assert found.tolist() == [5 * chunk for chunk in chunks]
