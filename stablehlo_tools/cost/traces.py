"""Makes a measured profile from a trace of jax.profiler.trace.

    with jax.profiler.trace("trace"):          trace/plugins/profile/DATE/HOST.trace.json.gz
        step(…).block_until_ready()      ==>   {"schema": …, "ops": {"dot.3": 81250.0, …}}

The trace is Chrome's JSON, with an event for each run of an HLO instruction on each device. The
event's arguments name the module and the instruction (`hlo_op`). On XLA:TPU the event's own name is
the instruction, and `hlo_category` is an argument. On XLA:CPU an argument names the device; on
other backends the process is the device.

An instruction's time is the median of its runs on a device, and the least of all devices: a device
that waits for the others shows the wait as its own time. If no event covers all kernels of an
instruction, their times are added. A loop's time includes its body, whose ops have events too.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from stablehlo_tools.cost.clock import measured_document
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.files.json_text import read_json

_HOW = "jax.profiler.trace('DIR') around the step writes DIR/…/*.trace.json.gz"
_TRACE = ".trace.json.gz"
_XPLANE = ".xplane.pb"

type _Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _KernelRun:
    """One run of one kernel of an HLO instruction."""

    module: str
    op: str
    kernel: str
    device: str
    ns: float


def profile_from_trace(path: Path, module: str | None = None) -> dict[str, object]:
    """Returns the document of a measured profile for one compiled program of the trace.

    `path` is the directory of the traces or a single file. Of a directory, the newest run is read,
    with the files of all hosts. `module` is the HLO module; None selects the one with the most
    time. Raises ToolError if `path` has no trace or no XLA op, or a file cannot be read.
    """
    with naming(str(path)):
        runs = [run for file in _files(path) for run in _runs(file)]
        if not runs:
            raise ToolError("no XLA op in this trace; trace a call that is already compiled")
        totals: defaultdict[str, float] = defaultdict(float)
        for run in runs:
            totals[run.module] += run.ns
        if module is not None and module not in totals:
            known = ", ".join(sorted(totals))
            raise ToolError(f"no module {module!r} in this trace; it has {known}")
        largest = max(totals, key=lambda name: (totals[name], name))
        chosen = largest if module is None else module
        durations: defaultdict[tuple[str, str], defaultdict[str, list[float]]]
        durations = defaultdict(lambda: defaultdict(list))
        for run in runs:
            if run.module == chosen:
                durations[run.op, run.device][run.kernel].append(run.ns)
        least: dict[str, float] = {}
        for (op, _), kernels in durations.items():
            parts = [kernels[op]] if op in kernels else list(kernels.values())
            ns = sum(statistics.median(times) for times in parts)
            least[op] = min(ns, least.get(op, ns))
        source = f"jax.profiler.trace of module {chosen}, {path}"
        return measured_document(source, {op: round(ns, 3) for op, ns in least.items()})


def _files(path: Path) -> list[Path]:
    """Returns the trace files of the newest run under a directory, or the file itself.

    Raises ToolError if there is none.
    """
    if path.is_file():
        if path.name.endswith(_XPLANE):
            raise ToolError(f"this is an XPlane; give the {_TRACE} next to it instead")
        return [path]
    if not path.exists():
        raise ToolError("no such file or directory", hint=_HOW)
    traces = sorted(path.rglob(f"*{_TRACE}"))
    if not traces:
        raise ToolError(
            f"no *{_TRACE} in it or below; jax.profiler.trace(DIRECTORY) writes "
            f"DIRECTORY/plugins/profile/DATE/HOST{_TRACE}"
        )
    newest = max(file.parent for file in traces)  # directories are named by date
    return [file for file in traces if file.parent == newest]


def _runs(file: Path) -> Iterator[_KernelRun]:
    try:
        document = read_json(file, repeated_keys=True)
    except ToolError as error:
        raise ToolError(
            f"{file.name} is not a trace: {error.diagnostic.message}", hint=_HOW
        ) from None
    events = cast("_Json", document).get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise ToolError(f"{file.name} has no 'traceEvents', which a Chrome trace has", hint=_HOW)
    for event in [
        cast("_Json", event) for event in cast("list[object]", events) if isinstance(event, dict)
    ]:
        arguments = event.get("args")
        if event.get("ph") != "X" or not isinstance(arguments, dict):
            continue
        values = cast("_Json", arguments)
        name = str(event.get("name", ""))
        op = values.get("hlo_op", name if "hlo_category" in values else None)
        duration = event.get("dur")
        if op is None or not isinstance(duration, int | float):
            continue
        if not 0 <= duration < math.inf:
            raise ToolError(f"{file.name}: a run of {op!r} takes {duration} us")
        yield _KernelRun(
            module=str(values.get("hlo_module", "")),
            op=str(op).removeprefix("%"),
            kernel=name,
            device=f"{file.name} {values.get('device_ordinal', event.get('pid'))}",
            ns=duration * 1e3,  # Chrome's are in microseconds
        )
