"""Documents for the tests of the views: a small clock that times sends, waits and compute."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stablehlo_tools.overlap.collective_times import CollectiveRow, Hider
from stablehlo_tools.report.document import Alive, Document, LoopRow, ProgramReport, TimelineEvent

MIB = 2.0**20
GIB = 2.0**30
US = 1e3


@dataclass
class Clock:
    """Issues tasks in program order and keeps the document of what happened."""

    streams: list[str] = field(default_factory=lambda: ["compute"])
    now: float = 0.0
    critical: bool = False
    alive: float = 0.0
    events: list[TimelineEvent] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    rows: dict[int, CollectiveRow] = field(default_factory=dict)
    loops: list[LoopRow] = field(default_factory=list)
    _free: dict[int, float] = field(default_factory=dict)  # when a stream is done
    _flying: dict[int, tuple[float, float]] = field(default_factory=dict)

    def collective(self, kind: str, name: str, stream: str, size: float, **more: object) -> int:
        """A row to be sent, once or more."""
        if stream not in self.streams:
            self.streams.append(stream)
        number = len(self.rows)
        row = CollectiveRow(
            number, kind, name, "[[0..7]]", ("data",), stream, "ring", "bf16", size,
            0, 0.0, 0.0, (), 0.0, "", "llama.py:88 in block",
        )  # fmt: skip
        self.rows[number] = replace(row, **more)  # pyright: ignore[reportArgumentType]
        return number

    def compute(self, label: str, ns: float, op: str = "dot_general", place: str = "") -> None:
        place = place or "llama.py:101 in attention"
        self._add(0, self.now, self.now + ns, label, op, place, "compute")
        self.now += ns

    def send(self, number: int, ns: float) -> None:
        row = self.rows[number]
        stream = self.streams.index(row.stream)
        begin = max(self.now, self._free.get(stream, 0.0))
        self._free[stream] = begin + ns
        self._flying[number] = (begin, begin + ns)
        self._add(stream, begin, begin + ns, row.name, row.kind, row.place, "collective", number)
        self.rows[number] = replace(row, times=row.times + 1, ns=row.ns + ns)

    def wait(self, number: int) -> None:
        row = self.rows[number]
        begin, end = self._flying.pop(number)
        hidden: dict[str, float] = {by.name: by.ns for by in row.hidden_by}
        for event in reversed(self.events):
            if event.kind == "compute" and event.end > begin:
                covered = min(event.end, end) - max(event.begin, begin)
                if covered > 0:
                    hidden[event.label] = hidden.get(event.label, 0.0) + covered
            if event.kind == "compute" and event.end < begin:
                break
        still = max(0.0, end - self.now)
        if still:
            self._add(0, self.now, end, f"wait for {row.name}", row.kind, row.place, "wait", number)
        self.now += still
        self.rows[number] = replace(
            row,
            exposed_ns=row.exposed_ns + still,
            hidden_by=tuple(Hider(name, ns) for name, ns in hidden.items()),
        )

    def fold(self, label: str, iterations: int, since: float) -> None:
        """So many iterations like the one that began at `since`, as a block on every stream."""
        ns = iterations * (self.now - since)
        for stream in range(len(self.streams)):
            begin = max(self.now, self._free.get(stream, 0.0))
            self.events.append(
                TimelineEvent(
                    stream, begin, self.now + ns, label, "while", "llama.py:140 in layers",
                    "loop", folded=iterations,
                )
            )  # fmt: skip
        self.now += ns
        for number, row in self.rows.items():
            if row.times:
                times = row.times + iterations
                scale = times / row.times
                self.rows[number] = replace(
                    row,
                    times=times,
                    ns=row.ns * scale,
                    exposed_ns=row.exposed_ns * scale,
                    hidden_by=tuple(Hider(by.name, by.ns * scale) for by in row.hidden_by),
                )

    def hold(self, size: float) -> None:
        """`size` more bytes are alive from now on, fewer where it is negative."""
        self.alive += size
        self.memory.append((self.now, self.alive))

    def program(self, name: str, target: str = "as written", **more: object) -> ProgramReport:
        busy = sum(e.end - e.begin for e in self.events if e.stream == 0 and e.kind != "wait")
        exposed = sum(row.exposed_ns for row in self.rows.values())
        compute = self.now - exposed
        rows = tuple(self.rows.values())
        report = ProgramReport(
            name=name,
            target=target,
            hardware="8 × H100 SXM",
            devices=64,
            total_ns=self.now,
            compute_ns=min(compute, busy),
            communication_ns=sum(row.ns for row in rows),
            exposed_ns=exposed,
            contended_ns=self.now,
            floor_ns=min(compute, busy),
            slot_floor_ns=None,
            floor_is="compute stream",
            critical_path_ns=0.8 * self.now,
            peak_bytes=max((size for _, size in self.memory), default=0.0),
            capacity_bytes=80 * GIB,
            alive=(),
            streams=tuple(self.streams),
            collectives=rows,
            loops=tuple(self.loops),
            events=tuple(self.events),
            memory=tuple(self.memory),
        )
        return replace(report, **more)  # pyright: ignore[reportArgumentType]

    def _add(
        self,
        stream: int,
        begin: float,
        end: float,
        label: str,
        op: str,
        place: str,
        kind: str,
        number: int = -1,
    ) -> None:
        critical = self.critical and kind != "collective"
        self.events.append(
            TimelineEvent(stream, begin, end, label, op, place, kind, number, critical=critical)
        )


def tiny() -> Document:
    """One all-reduce of 3 us behind 1 us of compute: 2 us are exposed."""
    clock = Clock()
    clock.hold(1 * GIB)
    clock.compute("first", 2 * US)
    number = clock.collective("all_reduce", "grads", "NVLink data", 4 * MIB)
    clock.send(number, 3 * US)
    clock.hold(2 * GIB)
    clock.compute("second", 1 * US)
    clock.wait(number)
    clock.hold(-1 * GIB)
    clock.compute("third", 4 * US)
    return Document("tiny", "0.1.0", (clock.program("step"),))


def before_after() -> Document:
    """A training step of a Llama-like model, gathered layer by layer or one layer ahead."""
    return Document(
        "llama_8b.train_step", "0.1.0", (_llama("before", ahead=False), _llama("after", ahead=True))
    )


def one_program() -> Document:
    return Document("llama_8b.train_step", "0.1.0", (_llama("train_step", ahead=False),))


def many_events(count: int = 10_000) -> Document:
    """A step without folded loops: at least `count` events on four streams, before and after."""
    programs = tuple(
        _llama(name, ahead=ahead, drawn=count // 2 // 16, folded=0)
        for name, ahead in (("before", False), ("after", True))
    )
    return Document(f"{count} events", "0.1.0", programs)


def hostile_names() -> Document:
    """Names that would break a page which pastes them into its source."""
    clock = Clock(streams=["compute </script><script>window.broken = 1</script>"])
    names = [
        "</script><script>window.broken = 1</script>",
        "<!--<script>",
        "]]> & &amp; <img src=x onerror='window.broken = 1'>",
        "„Größe\u201c \u2192 層の重み 🚀 \u2028 \u202e",
        "\"double\" 'single' `back` \\ ${window.broken = 1} {{data}} {{scripts}}",
        "a_very_long_name_" * 20,
        "\ud800 half a pair",
    ]
    clock.hold(3 * GIB)
    for name in names:
        number = clock.collective(
            "all_gather", name, name, 3 * MIB, groups=name, axes=(name, "b"), algorithm=name,
            why=name, place=name, dtype=name,
        )  # fmt: skip
        clock.send(number, 30 * US)
        clock.compute(name, 20 * US, op=name, place=name)
        clock.wait(number)
    clock.loops.append(LoopRow(names[0], 3, 9.0, 3.0, 1, names[1]))
    alive = tuple(Alive(name, GIB, name) for name in names)
    program = clock.program(names[0], names[1], hardware=names[2], alive=alive, notes=tuple(names))
    return Document(names[0], names[1], (program,))


def empty() -> Document:
    """A program that does nothing."""
    program = Clock().program("identity", peak_bytes=0.0, floor_is="", critical_path_ns=0.0)
    return Document("empty", "0.1.0", (program,))


def no_collectives() -> Document:
    clock = Clock()
    clock.hold(5 * GIB)
    for layer in range(4):
        clock.compute(f"matmul {layer}", 800 * US)
        clock.hold(GIB)
    return Document("mlp on one device", "0.1.0", (clock.program("mlp", devices=1),))


def unknown_trips() -> Document:
    """A `while` whose count is not known: one iteration was timed."""
    clock = Clock()
    clock.hold(2 * GIB)
    number = clock.collective(
        "all_reduce", "residual", "NVLink data", 64.0,
        why="the loop's condition reads the result", place="solver.py:31 in cond",
    )  # fmt: skip
    clock.compute("matvec", 90 * US, place="solver.py:24 in body")
    clock.send(number, 12 * US)
    clock.wait(number)
    clock.loops.append(LoopRow("while", None, clock.now, clock.now, 0, "solver.py:20 in cg"))
    note = "solver.py:20 in cg: how often the loop runs is not known; one iteration was timed"
    return Document("cg", "0.1.0", (clock.program("cg", notes=(note,)),))


def _llama(name: str, *, ahead: bool, drawn: int = 3, folded: int = 29) -> ProgramReport:
    clock = Clock(critical=True)
    gather = clock.collective(
        "all_gather", "all_gather.17", "NVLink fsdp", 218 * MIB, axes=("fsdp",),
        groups="[[0, 8, 16, 24, 32, 40, 48, 56], [1, 9, 17, 25, 33, 41, 49, 57], … 6 more]",
        why="" if ahead else "its use follows at once; the weights could be gathered a layer ahead",
        place="llama.py:142 in layer (weights)",
    )  # fmt: skip
    attention = clock.collective(
        "all_reduce", "all_reduce.23", "NVLink tensor", 32 * MIB, axes=("tensor",),
        groups="[[0..7], [8..15], … 6 more]", algorithm="NVLS",
        why="the residual sum reads it, and nothing else is ready",
        place="llama.py:118 in attention",
    )  # fmt: skip
    mlp = clock.collective(
        "all_reduce", "all_reduce.31", "NVLink tensor", 32 * MIB, axes=("tensor",),
        groups="[[0..7], [8..15], … 6 more]", algorithm="NVLS",
        why="the residual sum reads it, and nothing else is ready", place="llama.py:131 in mlp",
    )  # fmt: skip
    scatter = clock.collective(
        "reduce_scatter", "reduce_scatter.40", "IB fsdp", 218 * MIB, axes=("fsdp", "replica"),
        groups="[[0, 8, 16, 24, 32, 40, 48, 56], [1, 9, 17, 25, 33, 41, 49, 57], … 6 more]",
        algorithm="hierarchical ring", dtype="f32", place="train.py:61 in grads",
    )  # fmt: skip
    norm = clock.collective(
        "all_reduce", "all_reduce.55", "IB fsdp", 4.0, axes=("fsdp", "tensor"),
        groups="[[0..63]]", algorithm="tree", dtype="f32",
        why="the update waits for the norm", place="train.py:70 in clip_by_global_norm",
    )  # fmt: skip
    clock.hold(31 * GIB)
    clock.compute("embed", 310 * US, "gather", "llama.py:161 in embed")
    if ahead:
        clock.send(gather, 520 * US)
    began = clock.now
    for layer in range(drawn):
        since = clock.now
        _layer(clock, (gather, attention, mlp, scatter), ahead=ahead, first=layer == 0)
        if layer % 32 == 31:
            clock.hold(-32 * 0.6 * GIB)
        if layer == 1 and folded:
            clock.fold("layers", folded, since)
            clock.alive += folded * 0.6 * GIB
    if ahead:
        clock.wait(gather)
    clock.loops.append(
        LoopRow("layers", drawn + folded, clock.now - began, (clock.now - began) / (drawn + folded),
                0, "llama.py:140 in layers")
    )  # fmt: skip
    clock.hold(2.5 * GIB)
    clock.compute("logits", 1400 * US, place="llama.py:170 in head")
    clock.compute("softmax_cross_entropy", 420 * US, "fusion", "loss.py:12 in loss")
    peak = clock.alive
    clock.hold(-2.5 * GIB)
    clock.wait(scatter)
    clock.send(norm, 28 * US)
    clock.wait(norm)
    clock.compute("adamw", 900 * US, "fusion", "optax/adamw.py:44 in update")
    clock.hold(-0.8 * clock.alive)
    program = clock.program(name, "as written" if not ahead else "XLA:GPU")
    rows = tuple(replace(row, hideable_ns=_hideable(row)) for row in program.collectives)
    return replace(
        program,
        collectives=rows,
        floor_ns=0.94 * program.compute_ns,
        alive=(
            Alive(
                "activations of layers (saved for the backward pass)",
                0.52 * peak,
                "llama.py:140 in layers",
            ),
            Alive("parameters", 0.17 * peak, "%arg0"),
            Alive("adamw first moments", 0.12 * peak, "%arg1"),
            Alive("adamw second moments", 0.12 * peak, "%arg2"),
            Alive("logits", 0.05 * peak, "llama.py:170 in head"),
            Alive("gathered weights", 0.02 * peak, "llama.py:142 in layer (weights)"),
        ),
        notes=(
            "softmax_cross_entropy: no kernel time is known; its bytes at 3.35 TB/s are its time",
            "NVLS is assumed for all_reduce within a host; NCCL_NVLS_ENABLE=0 would change that",
        ),
    )  # fmt: skip


def _hideable(row: CollectiveRow) -> float:
    covered = sum(by.ns for by in row.hidden_by)
    return row.ns if not row.why else covered + 0.1 * (row.ns - covered)


def _layer(clock: Clock, numbers: tuple[int, int, int, int], *, ahead: bool, first: bool) -> None:
    gather, attention, mlp, scatter = numbers
    if not ahead:
        clock.send(gather, 520 * US)
    clock.wait(gather)
    clock.hold(0.4 * GIB)
    if ahead:
        clock.send(gather, 520 * US)
    clock.compute("rms_norm", 38 * US, "fusion", "llama.py:96 in rms_norm")
    clock.compute("qkv", 290 * US, place="llama.py:104 in attention")
    clock.compute("rope", 41 * US, "fusion", "llama.py:107 in rope")
    clock.compute("flash_attention", 410 * US, "custom_call", "llama.py:110 in attention")
    clock.compute("attention out", 120 * US, place="llama.py:116 in attention")
    clock.send(attention, 88 * US)
    clock.wait(attention)
    clock.compute("rms_norm", 38 * US, "fusion", "llama.py:96 in rms_norm")
    clock.hold(0.3 * GIB)
    clock.compute("gate_up", 520 * US, place="llama.py:126 in mlp")
    clock.compute("silu", 33 * US, "fusion", "llama.py:128 in mlp")
    clock.compute("down", 260 * US, place="llama.py:130 in mlp")
    clock.send(mlp, 88 * US)
    clock.wait(mlp)
    clock.compute("residual", 21 * US, "add", "llama.py:133 in block")
    if not first:
        clock.wait(scatter)
    clock.send(scatter, 1150 * US)
    clock.hold(-0.1 * GIB)


def many_collectives(count: int = 150) -> Document:
    """A table of so many rows, each collective as long as its number says."""
    clock = Clock()
    clock.compute("first", US)
    for index in range(count):
        number = clock.collective("all_gather", f"all_gather.{index}", "NVLink data", MIB)
        clock.send(number, (1 + index) * US)
        clock.wait(number)
    return Document(f"{count} collectives", "0.1.0", (clock.program("step"),))
