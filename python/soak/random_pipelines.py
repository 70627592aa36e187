"""Random loops with permutes, of which devices, counters and data choose what is used, as text.

Floats are only added, compared and moved, so that no compiler rounds them in another way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

DEVICES = 4
ROWS = 5
VECTOR = "tensor<2xf32>"
BUFFER = f"tensor<{ROWS}x2xf32>"
FLAG = "tensor<i1>"
NUMBER = "tensor<i32>"
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, "


@dataclass
class Loop:
    """A body under construction; `vectors` and `buffers` name the values so far."""

    random: random.Random
    devices: int  # that a permute is among
    channel: str
    lines: list[str] = field(default_factory=list[str])
    vectors: list[str] = field(default_factory=list[str])
    buffers: list[str] = field(default_factory=list[str])
    count: int = 0

    def emit(self, text: str) -> str:
        """Adds an op; the name of its result."""
        self.count += 1
        name = f"%v{self.count}"
        self.lines.append(f"{name} = {text}")
        return name

    def vector(self) -> str:
        """A value, those of late more often."""
        return self.random.choice(self.vectors[-4:])

    def number(self) -> str:
        """An integer that follows from the counter and the device."""
        kind = self.random.randrange(5)
        if kind == 0:
            return "%i"
        if kind == 1:
            return "%id"
        other = self.random.choice(["%id", "%one", "%two"])
        name = self.random.choice(["add", "subtract"])
        number = self.emit(f"stablehlo.{name} %i, {other} : {NUMBER}")
        if kind < 4:
            return number
        return self.emit(f"stablehlo.remainder {number}, %rows : {NUMBER}")

    def flag(self, *, uniform: bool = False) -> str:
        """A predicate: of counter and device, or of data."""
        if not uniform and self.random.random() < 0.1:
            first = self.emit(
                f"stablehlo.slice {self.vector()} [0:1] : ({VECTOR}) -> tensor<1xf32>"
            )
            scalar = self.emit(f"stablehlo.reshape {first} : (tensor<1xf32>) -> tensor<f32>")
            return self.emit(
                f"stablehlo.compare GT, {scalar}, %zero : (tensor<f32>, tensor<f32>) -> {FLAG}"
            )
        number = "%i" if uniform else self.number()
        way = self.random.choice(["LT", "LE", "EQ", "NE", "GT", "GE"])
        bound = self.emit(f"stablehlo.constant dense<{self.random.randrange(-1, 6)}> : {NUMBER}")
        return self.emit(
            f"stablehlo.compare {way}, {number}, {bound} : ({NUMBER}, {NUMBER}) -> {FLAG}"
        )

    def pairs(self) -> str:
        """Some pairs of devices, each once a source and once a target at most."""
        sources, targets = list(range(self.devices)), list(range(self.devices))
        self.random.shuffle(sources)
        self.random.shuffle(targets)
        count = self.random.randrange(1, self.devices + 1)
        return str([list(pair) for pair in zip(sources, targets, strict=True)][:count])

    def permute(self, operand: str) -> str:
        """A permute of random pairs."""
        pairs = self.pairs()
        return (
            f'"stablehlo.collective_permute"({operand}) {{{self.channel}source_target_pairs = '
            f"dense<{pairs}> : tensor<{pairs.count('[') - 1}x2xi64>}} : ({VECTOR}) -> {VECTOR}"
        )

    def step(self) -> None:
        """A random op."""
        kind = self.random.randrange(10)
        if kind < 2:
            self.vectors.append(self.emit(self.permute(self.vector())))
        elif kind < 3:
            name = self.random.choice(["add", "maximum"])
            self.vectors.append(
                self.emit(f"stablehlo.{name} {self.vector()}, {self.vector()} : {VECTOR}")
            )
        elif kind < 5:
            sides = [self.vector(), self.random.choice([self.vector(), "%zeros", "%fed"])]
            self.random.shuffle(sides)
            self.vectors.append(
                self.emit(
                    f"stablehlo.select {self.flag()}, {sides[0]}, {sides[1]} : {FLAG}, {VECTOR}"
                )
            )
        elif kind < 7:
            self.branch()
        else:
            self.access(writes=kind > 7)

    def branch(self) -> None:
        """An `if`, of which one side permutes where all devices take the same."""
        uniform = self.random.random() < 0.5
        flag = self.flag(uniform=uniform)
        one, other = self.vector(), self.vector()
        made = self.permute(one) if uniform else f"stablehlo.add {one}, {other} : {VECTOR}"
        self.vectors.append(
            self.emit(
                f'"stablehlo.if"({flag}) ({{\n %r{self.count} = {made}\n'
                f'"stablehlo.return"(%r{self.count}) : ({VECTOR}) -> ()\n}}, {{\n'
                f'"stablehlo.return"({other}) : ({VECTOR}) -> ()\n}}) : ({FLAG}) -> {VECTOR}'
            )
        )

    def access(self, *, writes: bool) -> None:
        """A row of a buffer, read or written."""
        at, buffer, row = self.number(), self.buffers[-1], f"tensor<1x2x{'f32'}>"
        if not writes:
            read = self.emit(
                f"stablehlo.dynamic_slice {buffer}, {at}, %none, sizes = [1, 2] : "
                f"({BUFFER}, {NUMBER}, {NUMBER}) -> {row}"
            )
            self.vectors.append(self.emit(f"stablehlo.reshape {read} : ({row}) -> {VECTOR}"))
            return
        part = self.emit(f"stablehlo.reshape {self.vector()} : ({VECTOR}) -> {row}")
        self.buffers.append(
            self.emit(
                f"stablehlo.dynamic_update_slice {buffer}, {part}, {at}, %none : "
                f"({BUFFER}, {row}, {NUMBER}, {NUMBER}) -> {BUFFER}"
            )
        )


def replicas_of(seed: int) -> int:
    """How many replicas a random program has; the rest of the processes are partitions."""
    return [1, 1, 2, 4][seed % 4]


def random_loop(seed: int) -> str:
    """A program of four processes: of a vector and a buffer, one of them again after a loop."""
    chosen = random.Random(seed)
    replicas = replicas_of(seed)
    partitions = DEVICES // replicas
    number, devices, channel = "partition", partitions, CHANNEL
    if replicas == DEVICES or chosen.random() < 0.3:
        number, devices, channel = "replica", replicas, ""
    loop = Loop(chosen, devices, channel, vectors=["%a", "%b"], buffers=["%c"])
    start, step, trips = chosen.choice([0, 0, -2, 3]), chosen.choice([1, 1, -1, 2]), seed % 10
    loop.lines.append(
        f"%fed = stablehlo.add %x, %b : {VECTOR}"
        if chosen.random() < 0.5
        else f"%fed = stablehlo.add %x, %x : {VECTOR}"
    )
    for _ in range(chosen.randrange(4, 16)):
        loop.step()
    ends = [loop.vector(), loop.vector(), loop.buffers[-1]]
    body = "\n".join(loop.lines)
    way, bound = ("LT" if step > 0 else "GT"), start + step * trips
    last = chosen.randrange(devices)
    shown = chosen.choice(["%w#1", "%w#2", "%row"])
    return f"""
module attributes {{
  mhlo.num_replicas = {replicas} : i32, mhlo.num_partitions = {partitions} : i32
}} {{
  func.func @main(%x: {VECTOR}, %y: {BUFFER}) -> {VECTOR} {{
    %none = stablehlo.constant dense<0> : {NUMBER}
    %one = stablehlo.constant dense<1> : {NUMBER}
    %two = stablehlo.constant dense<2> : {NUMBER}
    %rows = stablehlo.constant dense<{ROWS}> : {NUMBER}
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %zeros = stablehlo.constant dense<0.0> : {VECTOR}
    %p = stablehlo.{number}_id : tensor<ui32>
    %id = stablehlo.convert %p : (tensor<ui32>) -> {NUMBER}
    %start = stablehlo.constant dense<{start}> : {NUMBER}
    %step = stablehlo.constant dense<{step}> : {NUMBER}
    %bound = stablehlo.constant dense<{bound}> : {NUMBER}
    %w:4 = stablehlo.while(%i = %start, %a = %x, %b = %{chosen.choice(["x", "zeros"])}, %c = %y)
      : {NUMBER}, {VECTOR}, {VECTOR}, {BUFFER}
    cond {{
      %g = stablehlo.compare {way}, %i, %bound : ({NUMBER}, {NUMBER}) -> {FLAG}
      stablehlo.return %g : {FLAG}
    }} do {{
      {body}
      %n = stablehlo.add %i, %step : {NUMBER}
      stablehlo.return %n, {", ".join(ends)} : {NUMBER}, {VECTOR}, {VECTOR}, {BUFFER}
    }}
    %at = stablehlo.constant dense<{chosen.randrange(ROWS)}> : {NUMBER}
    %part = stablehlo.dynamic_slice %w#3, %at, %none, sizes = [1, 2]
      : ({BUFFER}, {NUMBER}, {NUMBER}) -> tensor<1x2xf32>
    %row = stablehlo.reshape %part : (tensor<1x2xf32>) -> {VECTOR}
    %last = stablehlo.constant dense<{last}> : {NUMBER}
    %mine = stablehlo.compare EQ, %id, %last : ({NUMBER}, {NUMBER}) -> {FLAG}
    %out = stablehlo.select %mine, {shown}, %zeros : {FLAG}, {VECTOR}
    return %out : {VECTOR}
  }}
}}
"""
