"""Sets of rank programs written by hand for any schedule, and the step that they are parts of.

The model is a chain of stages `y = tanh(x @ w[s])`. The loss is the sum of the squares of what the
last stage makes, over all microbatches; a step moves the weights against the gradient:

    step(w: (stages, WIDTH, WIDTH), x: (microbatches, ROWS * devices, WIDTH))
        -> (new w, loss, sum of the squares of the gradient)

Where ranks have several devices, these divide the rows of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stablehlo_tools.mpmd.manifest import (
    NAME,
    Manifest,
    ManifestEntry,
    ManifestPiece,
    ManifestStage,
    ManifestTransfer,
    Rank,
    encode_manifest,
    function_of,
)
from stablehlo_tools.schedules.catalogue import build
from stablehlo_tools.schedules.explicit_tables import with_communication
from stablehlo_tools.schedules.setting import ScheduleSetting, unit_costs
from stablehlo_tools.schedules.table import Action, ActionKind, Table, actions_of, drop_idle_cells

if TYPE_CHECKING:
    import jax

# A schedule, its ranks, microbatches and chunks, and the devices of a rank.
Case = tuple[str, int, int, int | None, int]

WIDTH, ROWS, RATE = 4, 2, 0.1
_TOKEN = "!stablehlo.token"
_SCALAR = "tensor<f32>"
_NUMBER = "tensor<i32>"
_WEIGHT = f"tensor<1x{WIDTH}x{WIDTH}xf32>"
_SHARED = 1  # the channel of every collective, as JAX exports them; that of a transfer as well
_SEND = {ActionKind.SEND_FORWARD: 1, ActionKind.SEND_BACKWARD: -1}
_REDUCER = """({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    })"""


def table_of(case: Case) -> Table:
    """The schedule of a case."""
    name, ranks, microbatches, chunks, _ = case
    return build(name, ScheduleSetting(ranks, microbatches, unit_costs(ranks), chunks=chunks))


def write_set(directory: Path, table: Table, devices: int = 1) -> Manifest:
    """Writes a set of rank programs for a table of training steps; `source` is `step.jax_export`.

    Sends and receives are put into a table that has none. Several microbatches in a row, split
    gradients, chunks and routes in two directions may be in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    played = (
        drop_idle_cells(table) if table.communicates else with_communication(drop_idle_cells(table))
    )
    writer = _Set(played, devices)
    texts = [_RankProgram(writer, rank).text() for rank in range(played.ranks)]
    for rank, text in enumerate(texts):
        (directory / f"rank_{rank}.mlir").write_text(text, encoding="utf-8")
    described = writer.manifest()
    (directory / NAME).write_text(encode_manifest(described), encoding="utf-8")
    return described


def write_step(path: Path, table: Table, devices: int = 1) -> None:
    """Exports the step that the rank programs of a table are parts of."""
    import jax
    import jax.numpy as jnp

    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in input_shapes(table, devices)]
    step = jax.jit(step_of(table.stages))
    path.write_bytes(jax.export.export(step, platforms=["cpu"])(*specs).serialize())


def input_shapes(table: Table, devices: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the weights and the batch."""
    rows = ROWS * devices
    return (table.stages, WIDTH, WIDTH), (table.microbatches, rows, WIDTH)


def step_of(stages: int) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """The step, to be traced by JAX."""
    import jax
    import jax.numpy as jnp

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
            for stage in range(stages):
                rows = jnp.tanh(rows @ w[stage])
            return total + jnp.sum(rows * rows), None

        return jax.lax.scan(add, jnp.float32(0), x)[0]

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        total, gradient = jax.value_and_grad(loss)(w, x)
        return w - RATE * gradient, total, jnp.sum(gradient * gradient)

    return step


@dataclass
class _Set:
    """What the programs of a set have in common."""

    table: Table
    devices: int
    transfers: list[ManifestTransfer] = field(default_factory=list[ManifestTransfer])

    def __post_init__(self) -> None:
        held = self.table.placement.held
        self.owner = [
            min(rank for rank, stages in enumerate(held) if stage in stages)
            for stage in range(self.table.stages)
        ]
        self.rows = f"tensor<{ROWS}x{WIDTH}xf32>"  # of a device
        self.batch = f"tensor<{self.table.microbatches}x{ROWS * self.devices}x{WIDTH}xf32>"
        self.shard = f"tensor<{self.table.microbatches}x{ROWS}x{WIDTH}xf32>"
        for row in self.table.rows:
            for action in actions_of(row):
                if action.kind in _SEND:
                    source, target = self.ends(action)
                    self._add(str(action), source, target, self.rows)
        for rank, stages in enumerate(held):
            for stage in stages:
                if self.owner[stage] != rank:
                    self._add(f"finish {stage}", rank, self.owner[stage], _WEIGHT)
            if self.table.stages - 1 in stages and self.owner[-1] != rank:
                self._add("finish loss", rank, self.owner[-1], _SCALAR)
        for rank in range(self.table.ranks - 1):
            self._add("finish norm", rank, rank + 1, _SCALAR)

    def ends(self, send: Action) -> tuple[int, int]:
        """The ranks between which what a send sends goes."""
        place = self.table.placement
        other = send.stage + _SEND[send.kind]
        return place.rank_of(send.stage, send.microbatch), place.rank_of(other, send.microbatch)

    def _add(self, action: str, source: int, target: int, kind: str) -> None:
        channel = len(self.transfers) + 1
        self.transfers.append(ManifestTransfer(channel, action, 0, source, target, kind))

    def transfer(self, send: str) -> ManifestTransfer:
        """The transfer that a send of the schedule makes."""
        return next(found for found in self.transfers if found.action == send)

    def manifest(self) -> Manifest:
        """The manifest; transfers behind the schedule are all called `finish` there."""
        table, ranks = self.table, range(self.table.ranks)
        held = table.placement.held
        first = [rank for rank in ranks if 0 in held[rank]]
        weights = tuple(
            ManifestPiece(rank, held[rank].index(stage), 0, stage, stage + 1)
            for stage in range(table.stages)
            for rank in ranks
            if stage in held[rank]
        )
        stack = f"tensor<{table.stages}x{WIDTH}x{WIDTH}xf32>"
        updated = tuple(
            ManifestPiece(
                owner,
                [s for s in held[owner] if self.owner[s] == owner].index(stage),
                0,
                stage,
                stage + 1,
            )
            for stage, owner in enumerate(self.owner)
        )
        last = self.owner[-1]
        norm_number = len(self.owned(table.ranks - 1)) + (last == table.ranks - 1)
        return Manifest(
            source="step.jax_export",
            devices=self.devices,
            form="pairs",
            table=table,
            ranks=tuple(Rank(f"rank_{rank}.mlir", held[rank]) for rank in ranks),
            stages=tuple(
                ManifestStage(s, f"layer {s}", 1e-6, 1e-6, 1e-6, 2e-6, 64.0, 64.0, 128.0, 32.0)
                for s in range(table.stages)
            ),
            hardware="h100-sxm",
            hop=1e-6,
            inputs=(
                ManifestEntry("[0]", stack, weights),
                ManifestEntry(
                    "[1]", self.batch, tuple(ManifestPiece(r, len(held[r])) for r in first)
                ),
            ),
            outputs=(
                ManifestEntry("[0]", stack, updated),
                ManifestEntry("[1]", _SCALAR, (ManifestPiece(last, len(self.owned(last))),)),
                ManifestEntry("[2]", _SCALAR, (ManifestPiece(table.ranks - 1, norm_number),)),
            ),
            transfers=tuple(
                ManifestTransfer(
                    t.channel, t.action.split()[0], t.tensor, t.source, t.target, t.type
                )
                for t in self.transfers
            ),
        )

    def owned(self, rank: int) -> list[int]:
        """The stages whose new weights a rank gives."""
        return [stage for stage, owner in enumerate(self.owner) if owner == rank]


class _RankProgram:
    """The text of the program of a rank."""

    def __init__(self, common: _Set, rank: int) -> None:
        self.common, self.rank = common, rank
        self.table = common.table
        self.stages = self.table.placement.held[rank]
        self.lines: list[str] = []
        self.functions: dict[str, str] = {}
        self.names = 0
        self.message = self.compute = ""
        self.known: dict[tuple[str, int, int], str] = {}  # what of which stage and microbatch
        self.sums: dict[int, str] = {}  # of gradients, by stage
        self.loss = ""

    def text(self) -> str:
        """The module."""
        common, last = self.common, self.table.stages - 1
        self.arguments = [_WEIGHT] * len(self.stages)
        if 0 in self.stages:
            self.arguments.append(common.batch)
        self.message = self._line(f"stablehlo.after_all : {_TOKEN}")
        self.compute = self._line(f"stablehlo.after_all : {_TOKEN}")
        numbers = sorted({a.microbatch for a in actions_of(self.table.rows[self.rank])})
        self.numbers = {
            n: self._line(f"stablehlo.constant dense<{n}> : {_NUMBER}") for n in numbers
        }
        zeros = [_WEIGHT] * len(self.stages) + [_SCALAR] * (last in self.stages)
        prepared = self._call("prepare", [], [], zeros, self._prepare(zeros))
        self.sums = dict(zip(self.stages, prepared, strict=False))
        self.loss = prepared[-1]
        for action in actions_of(self.table.rows[self.rank]):
            if action.kind.is_compute:
                self._compute(action)
            else:
                self._move(action)
        returned = self._finish()
        return self._module(returned)

    def _compute(self, action: Action) -> None:
        kind, stage, microbatch = action
        weight = f"%w{self.stages.index(stage)}"
        first, last = stage == 0, stage == self.table.stages - 1
        rows = self.common.rows
        key = (stage, microbatch)
        fresh: list[tuple[str, str]] = []  # a value, its type: through the barrier
        kept: list[tuple[str, str]] = []
        gives: list[str] = []
        if kind is ActionKind.FORWARD:
            if first:
                kept.append(("%x", self.common.shard))
            else:
                fresh.append((self.known["x", *key], rows))
            kept.append((weight, _WEIGHT))
            gives = [rows]
        elif kind is ActionKind.WEIGHT_GRADIENT:
            fresh.append((self.known["dz", *key], rows))
            if not first:
                fresh.append((self.known["x", *key], rows))
            kept = [("%x", self.common.shard)] if first else []
            kept.append((self.sums[stage], _WEIGHT))
            gives = [_WEIGHT]
        else:
            if not last:
                fresh.append((self.known["dy", *key], rows))
            fresh.append((self.known["y", *key], rows))
            whole = kind is ActionKind.BACKWARD
            if whole and not first:
                fresh.append((self.known["x", *key], rows))
            if whole and first:
                kept.append(("%x", self.common.shard))
            kept.append((weight, _WEIGHT))
            if whole:
                kept.append((self.sums[stage], _WEIGHT))
            if last:
                kept.append((self.loss, _SCALAR))
            gives = [rows] * (not first) + ([_WEIGHT] if whole else [rows]) + [_SCALAR] * last
        taken = [(self.numbers[microbatch], _NUMBER), *fresh]
        passed = self._barrier([*taken, (self.compute, _TOKEN)])
        operands = [*passed[:-1], *(value for value, _ in kept)]
        types = [kind_ for _, kind_ in (*taken, *kept)]
        name = function_of(kind, stage)
        results = self._call(name, operands, types, gives, self._body(kind, stage))
        after = self._barrier([*zip(results, gives, strict=True), (passed[-1], _TOKEN)])
        self.compute = after[-1]
        self._keep(action, after[:-1])

    def _keep(self, action: Action, results: list[str]) -> None:
        kind, stage, microbatch = action
        route = self.table.placement
        rest = list(results)
        if kind is ActionKind.FORWARD:
            self.known["y", stage, microbatch] = rest[0]
            if stage + 1 < self.table.stages and not route.crosses(stage, microbatch):
                self.known["x", stage + 1, microbatch] = rest[0]
            return
        if kind is not ActionKind.WEIGHT_GRADIENT and stage:
            self.known["dx", stage, microbatch] = rest.pop(0)
            if not route.crosses(stage - 1, microbatch):
                self.known["dy", stage - 1, microbatch] = results[0]
        if kind is ActionKind.INPUT_GRADIENT:
            self.known["dz", stage, microbatch] = rest.pop(0)
        else:
            self.sums[stage] = rest.pop(0)
        if rest:
            self.loss = rest[0]

    def _move(self, action: Action) -> None:
        kind, stage, microbatch = action
        if kind in _SEND:
            what = "y" if kind is ActionKind.SEND_FORWARD else "dx"
            self._send(self.common.transfer(str(action)), self.known[what, stage, microbatch])
            return
        forward = kind is ActionKind.RECEIVE_FORWARD
        sent = Action(
            ActionKind.SEND_FORWARD if forward else ActionKind.SEND_BACKWARD,
            stage - 1 if forward else stage + 1,
            microbatch,
        )
        received = self._receive(self.common.transfer(str(sent)))
        self.known["x" if forward else "dy", stage, microbatch] = received

    def _finish(self) -> list[tuple[str, str]]:
        """The rounds behind the schedule: sums of two routes, new weights, the norm."""
        common, rank = self.common, self.rank
        owned = common.owned(rank)
        others: dict[int, str] = {}
        losses = [self.loss] if common.owner[-1] == rank else []
        for transfer in common.transfers:
            action, _, what = transfer.action.partition(" ")
            if action != "finish" or what == "norm":
                continue
            if transfer.source == rank:
                self._send(transfer, self.loss if what == "loss" else self.sums[int(what)])
            elif transfer.target == rank and what == "loss":
                losses.append(self._receive(transfer))
            elif transfer.target == rank:
                others[int(what)] = self._receive(transfer)
        values = [f"%w{self.stages.index(stage)}" for stage in owned]
        values += [self.sums[stage] for stage in owned]
        values += [others[stage] for stage in owned if stage in others]
        types = [_WEIGHT] * len(values)
        values += losses
        types += [_SCALAR] * len(losses)
        gives = [_WEIGHT] * len(owned) + [_SCALAR] * bool(losses) + [_SCALAR]
        body = self._finish_0(owned, [stage in others for stage in owned], len(losses))
        results = self._call("finish_0", values, types, gives, body)
        norm = results.pop()
        for transfer in common.transfers:
            if transfer.action == "finish norm" and transfer.target == rank:
                received = self._receive(transfer)
                pair = [norm, received]
                norm = self._call("finish_1", pair, [_SCALAR] * 2, [_SCALAR], self._finish_1())[0]
        for transfer in common.transfers:
            if transfer.action == "finish norm" and transfer.source == rank:
                self._send(transfer, norm)
        returned = list(zip(results, gives, strict=False))
        return [*returned, (norm, _SCALAR)] if rank == self.table.ranks - 1 else returned

    def _module(self, returned: list[tuple[str, str]]) -> str:
        common, count = self.common, self.table.ranks * self.common.devices
        names = [f"%w{i}" for i in range(len(self.stages))] + ["%x"] * (0 in self.stages)
        head = f"attributes {{mhlo.num_partitions = {count} : i32, mhlo.num_replicas = 1 : i32}} {{"
        types = ", ".join(kind for _, kind in returned)
        values = ", ".join(value for value, _ in returned)
        body = [f"  {line}" for line in self.lines]
        if common.devices == 1:
            parameters = ", ".join(map(": ".join, zip(names, self.arguments, strict=True)))
            return "\n".join(
                [
                    f"module @jit_step {head}",
                    f"func.func public @main({parameters}) -> ({types}) {{",
                    *body,
                    f"  {_returned([v for v, _ in returned], [k for _, k in returned])}",
                    "}",
                    *self.functions.values(),
                    "}\n",
                ]
            )
        outer = [f"{name}_all" for name in names]
        parameters = ", ".join(map(": ".join, zip(outer, self.arguments, strict=True)))
        local = [k if k == _WEIGHT else common.shard for k in self.arguments]
        inner = ", ".join(map(": ".join, zip(names, local, strict=True)))
        ins = ", ".join(
            "<@mesh, [{}, {}, {}]>" if k == _WEIGHT else '<@mesh, [{}, {"data"}, {}]>'
            for k in self.arguments
        )
        outs = ", ".join(
            "<@mesh, []>" if k == _SCALAR else "<@mesh, [{}, {}, {}]>" for _, k in returned
        )
        results = ", ".join(f"%r#{i}" for i in range(len(returned)))
        named = f"%r:{len(returned)} = " if returned else ""  # a rank may return nothing
        of_types = f" : {types}" if returned else ""
        return "\n".join(
            [
                f"module @jit_step {head}",
                f'sdy.mesh @mesh = <["rank"={self.table.ranks}, "data"={common.devices}]>',
                f"func.func public @main({parameters}) -> ({types}) {{",
                f"  {named}sdy.manual_computation({', '.join(outer)}) "
                f'in_shardings=[{ins}] out_shardings=[{outs}] manual_axes={{"rank", "data"}} '
                f"({inner}) {{",
                *body,
                f"  sdy.return {values}{of_types}",
                f"  }} : ({', '.join(self.arguments)}) -> ({types})",
                f"  return {results}{of_types}",
                "}",
                *self.functions.values(),
                "}\n",
            ]
        )

    # What follows writes ops.

    def _line(self, text: str) -> str:
        self.names += 1
        name = f"%v{self.names}"
        self.lines.append(f"{name} = {text}")
        return name

    def _barrier(self, values: list[tuple[str, str]]) -> list[str]:
        self.names += 1
        name = f"%v{self.names}"
        operands = ", ".join(value for value, _ in values)
        types = ", ".join(kind for _, kind in values)
        count = len(values)
        self.lines.append(f"{name}:{count} = stablehlo.optimization_barrier {operands} : {types}")
        return [f"{name}#{i}" for i in range(count)]

    def _call(
        self, name: str, operands: list[str], types: list[str], gives: list[str], body: list[str]
    ) -> list[str]:
        parameters = ", ".join(f"%a{i}: {kind}" for i, kind in enumerate(types))
        self.functions[name] = "\n".join(
            [
                f"func.func private @{name}({parameters}) -> ({', '.join(gives)}) {{",
                *(f"    {line}" for line in body),
                "}",
            ]
        )
        self.names += 1
        result = f"%v{self.names}"
        kinds = f"({', '.join(types)}) -> ({', '.join(gives)})"
        count = len(gives)
        self.lines.append(f"{result}:{count} = func.call @{name}({', '.join(operands)}) : {kinds}")
        return [f"{result}#{i}" for i in range(count)]

    def _pairs(self, transfer: ManifestTransfer) -> str:
        size = self.common.devices
        pairs = [[transfer.source * size + d, transfer.target * size + d] for d in range(size)]
        handle = (
            f"channel_handle = #stablehlo.channel_handle<handle = {transfer.channel}, type = 1>"
        )
        return (
            f"<{{{handle}, is_host_transfer = false, source_target_pairs = dense<{pairs}> : "
            f"tensor<{size}x2xi64>}}>"
        )

    def _send(self, transfer: ManifestTransfer, value: str) -> None:
        self.message = self._line(
            f'"stablehlo.send"({value}, {self.message}) {self._pairs(transfer)} : '
            f"({transfer.type}, {_TOKEN}) -> {_TOKEN}"
        )

    def _receive(self, transfer: ManifestTransfer) -> str:
        self.names += 1
        name = f"%v{self.names}"
        self.lines.append(
            f'{name}:2 = "stablehlo.recv"({self.message}) {self._pairs(transfer)} : '
            f"({_TOKEN}) -> ({transfer.type}, {_TOKEN})"
        )
        self.message = f"{name}#1"
        return f"{name}#0"

    # What follows writes the bodies of functions; their arguments are %a0, %a1, …

    def _prepare(self, types: list[str]) -> list[str]:
        lines = [f"%z{i} = stablehlo.constant dense<0.0> : {k}" for i, k in enumerate(types)]
        return [*lines, _returned([f"%z{i}" for i in range(len(types))], types)]

    def _body(self, kind: ActionKind, stage: int) -> list[str]:
        first, last = stage == 0, stage == self.table.stages - 1
        rows, square = self.common.rows, f"tensor<{WIDTH}x{WIDTH}xf32>"
        arguments = iter(f"%a{i}" for i in range(1, 9))
        lines: list[str] = []

        def rows_of_batch() -> str:
            whole = next(arguments)
            one = f"tensor<1x{ROWS}x{WIDTH}xf32>"
            lines.extend(
                [
                    f"%zero = stablehlo.constant dense<0> : {_NUMBER}",
                    f"%one = stablehlo.dynamic_slice {whole}, %a0, %zero, %zero, sizes = "
                    f"[1, {ROWS}, {WIDTH}] : ({self.common.shard}, {_NUMBER}, {_NUMBER}, "
                    f"{_NUMBER}) -> {one}",
                    f"%x = stablehlo.reshape %one : ({one}) -> {rows}",
                ]
            )
            return "%x"

        def matrix() -> None:
            lines.append(f"%w = stablehlo.reshape {next(arguments)} : ({_WEIGHT}) -> {square}")

        def weights(x: str, dz: str, total: str) -> str:
            lines.extend(
                [
                    f"%g = stablehlo.dot_general {x}, {dz}, contracting_dims = [0] x [0] : "
                    f"({rows}, {rows}) -> {square}",
                    f"%h = stablehlo.reshape %g : ({square}) -> {_WEIGHT}",
                    f"%t = stablehlo.add {total}, %h : {_WEIGHT}",
                ]
            )
            return "%t"

        if kind is ActionKind.FORWARD:
            x = rows_of_batch() if first else next(arguments)
            matrix()
            lines += [
                f"%p = stablehlo.dot_general {x}, %w, contracting_dims = [1] x [0] : "
                f"({rows}, {square}) -> {rows}",
                f"%y = stablehlo.tanh %p : {rows}",
            ]
            return [*lines, _returned(["%y"], [rows])]
        if kind is ActionKind.WEIGHT_GRADIENT:
            dz = next(arguments)
            x = rows_of_batch() if first else next(arguments)
            total = weights(x, dz, next(arguments))
            return [*lines, _returned([total], [_WEIGHT])]
        slope = "" if last else next(arguments)
        y = next(arguments)
        whole = kind is ActionKind.BACKWARD
        x = "" if not whole else rows_of_batch() if first else next(arguments)
        matrix()
        returned: list[tuple[str, str]] = []
        if last:
            lines.append(f"%dy = stablehlo.add {y}, {y} : {rows}")
            slope = "%dy"
        lines += [
            f"%yy = stablehlo.multiply {y}, {y} : {rows}",
            f"%ones = stablehlo.constant dense<1.0> : {rows}",
            f"%d = stablehlo.subtract %ones, %yy : {rows}",
            f"%dz = stablehlo.multiply {slope}, %d : {rows}",
        ]
        if not first:
            lines.append(
                f"%dx = stablehlo.dot_general %dz, %w, contracting_dims = [1] x [1] : "
                f"({rows}, {square}) -> {rows}"
            )
            returned.append(("%dx", rows))
        if whole:
            returned.append((weights(x, "%dz", next(arguments)), _WEIGHT))
        else:
            returned.append(("%dz", rows))
        if last:
            lines += _sum("%yy", rows, "%term", "[0, 1]")
            lines.append(f"%loss = stablehlo.add {next(arguments)}, %term : {_SCALAR}")
            returned.append(("%loss", _SCALAR))
        values, types = zip(*returned, strict=True)
        return [*lines, _returned(list(values), list(types))]

    def _finish_0(self, owned: list[int], two: list[bool], losses: int) -> list[str]:
        count, lines = len(owned), [f"%n = stablehlo.constant dense<0.0> : {_SCALAR}"]
        lines.append(f"%rate = stablehlo.constant dense<{RATE}> : {_WEIGHT}")
        norm, extra, values = "%n", 2 * count, list[str]()
        for i, has_other in enumerate(two):
            total = f"%a{count + i}"
            if has_other:
                lines.append(f"%both{i} = stablehlo.add {total}, %a{extra} : {_WEIGHT}")
                total, extra = f"%both{i}", extra + 1
            total = self._all_reduce(lines, total, _WEIGHT, f"%all{i}")
            lines += [
                f"%step{i} = stablehlo.multiply %rate, {total} : {_WEIGHT}",
                f"%new{i} = stablehlo.subtract %a{i}, %step{i} : {_WEIGHT}",
                f"%square{i} = stablehlo.multiply {total}, {total} : {_WEIGHT}",
                *_sum(f"%square{i}", _WEIGHT, f"%part{i}", "[0, 1, 2]"),
                f"%norm{i} = stablehlo.add {norm}, %part{i} : {_SCALAR}",
            ]
            norm = f"%norm{i}"
            values.append(f"%new{i}")
        types = [_WEIGHT] * count
        if losses:
            loss = f"%a{extra}"
            for i in range(1, losses):
                lines.append(f"%loss{i} = stablehlo.add {loss}, %a{extra + i} : {_SCALAR}")
                loss = f"%loss{i}"
            values.append(self._all_reduce(lines, loss, _SCALAR, "%all_loss"))
            types.append(_SCALAR)
        return [*lines, _returned([*values, norm], [*types, _SCALAR])]

    def _finish_1(self) -> list[str]:
        return [f"%t = stablehlo.add %a1, %a0 : {_SCALAR}", _returned(["%t"], [_SCALAR])]

    def _all_reduce(self, lines: list[str], value: str, kind: str, name: str) -> str:
        """The sum over the devices of the rank."""
        size = self.common.devices
        if size == 1:
            return value
        groups = [[r * size + d for d in range(size)] for r in range(self.table.ranks)]
        lines.append(
            f'{name} = "stablehlo.all_reduce"({value}) <{{channel_handle = '
            f"#stablehlo.channel_handle<handle = {_SHARED}, type = 1>, "
            f"replica_groups = dense<{groups}> : tensor<{len(groups)}x{size}xi64>, "
            f"use_global_device_ids}}> {_REDUCER} : ({kind}) -> {kind}"
        )
        return name


def _sum(value: str, kind: str, name: str, dims: str) -> list[str]:
    return [
        f"{name}_zero = stablehlo.constant dense<0.0> : {_SCALAR}",
        f"{name} = stablehlo.reduce({value} init: {name}_zero) applies stablehlo.add across "
        f"dimensions = {dims} : ({kind}, {_SCALAR}) -> {_SCALAR}",
    ]


def _returned(values: list[str], types: list[str]) -> str:
    return f"return {', '.join(values)} : {', '.join(types)}" if values else "return"
