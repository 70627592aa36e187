"""Children that run rank programs: the files in their directory, and the errors they answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import Diagnostic, ToolError, first_line, note
from stablehlo_tools.processes import activity, child
from stablehlo_tools.processes.virtual_devices import virtual_devices

PACKAGE = "stablehlo_tools.mpmd.running"


def inputs_of(rank: int) -> str:
    """The file with the arguments of a rank."""
    return f"inputs_{rank}.npz"


def outputs_of(rank: int) -> str:
    """The file with the results of a rank."""
    return f"outputs_{rank}.npz"


def environment(devices: int, timeout: float, *, loose: bool = False) -> dict[str, str]:
    """The variables of a process with so many CPU devices.

    Its compiler keeps to the rounding of programs, or where `loose` rounds coarse floats less.
    """
    # Ranks meet at an address of this machine, which no proxy knows.
    inherited = {n: text for n, text in os.environ.items() if not n.lower().endswith("_proxy")}
    flags = [f"--xla_allow_excess_precision={str(loose).lower()}"]
    return virtual_devices(devices, timeout, flags, inherited)


def ask(
    module: str,
    directory: Path,
    request: dict[str, Any],
    devices: int,
    timeout: float,
    what: str,
    *,
    loose: bool = False,
) -> dict[str, Any]:
    """Has a module of this package answer a request. `what` it does goes into messages.

    `loose`: see `environment`. Raises ToolError for what it raised, and where it died or took more
    than `timeout` seconds.
    """
    variables = environment(devices, timeout, loose=loose)
    outcome = child.ask(
        f"{PACKAGE}.{module}", directory, request, timeout, variables, runs_programs=True
    )
    outcome.in_time(f"{what} took more than {timeout:g} s (--timeout) and was stopped")
    if outcome.answer is None:
        raise outcome.death("the process", what)
    if outcome.refusal is not None:
        raise _about_the_set(outcome.refusal)
    if outcome.error:
        raise ToolError(f"{what} failed: {first_line(outcome.error)}")
    return outcome.answer


def main(answer: Callable[[Path, dict[str, Any]], dict[str, Any]]) -> None:
    """In the child: answers the request in the directory that the command line names."""
    activity.trust_input()  # the parent has read it, and tells how this process ended
    child.answer_request(answer)


def _about_the_set(refusal: ToolError) -> ToolError:
    """The error with its places in the messages: they are not in the set, which it is about."""
    message, *notes = (_placed(each) for each in (refusal.diagnostic, *refusal.diagnostic.notes))
    error = ToolError(message, notes=tuple(note(text) for text in notes))
    error.input_name = refusal.input_name
    return error


def _placed(diagnostic: Diagnostic) -> str:
    place = diagnostic.place.render("").strip()
    return f"{diagnostic.message} (at {place})" if place.strip(":") else diagnostic.message
