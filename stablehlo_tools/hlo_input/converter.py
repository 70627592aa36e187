"""XLA's converter, in a process of its own: `python -m stablehlo_tools.hlo_input.converter DIR`.

DIR holds `module.hlo` and a request; what is left there is `module.mlirbc` and an answer
(`processes.child`). XLA's parser and converter end their process on some texts that they do not
understand.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from stablehlo_tools.diagnostics import Place, ToolError, first_line
from stablehlo_tools.hlo_input.text import HloText
from stablehlo_tools.processes import child
from stablehlo_tools.processes.ending import shortened

_MODULE = "stablehlo_tools.hlo_input.converter"
_INPUT, _OUTPUT = "module.hlo", "module.mlirbc"
_SECONDS = 60.0  # for a text of any size, and
_SECONDS_PER_MIB = 30.0  # more for each MiB of it

_WHERE = re.compile(r"was parsing (\d+):(\d+): (?:error: )?([^\n]*)")
_NAMED = re.compile(r"%([\w.-]+) = ")
_STATUS = re.compile(r"^(?:[A-Z_]+: )+")


def to_stablehlo(source: HloText) -> bytes:
    """The module as MLIR bytecode, every instruction marked in its location.

    Raises a ToolError, at the line of the text, where XLA cannot take it.
    """
    timeout = _SECONDS + _SECONDS_PER_MIB * len(source.text) / 2**20
    with tempfile.TemporaryDirectory(prefix="stablehlo-tools-") as name:
        directory = Path(name)
        (directory / _INPUT).write_text(source.converted)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        outcome = child.ask(_MODULE, directory, {}, timeout, environment)
        if outcome.error:
            raise _refused(outcome.error, source)
        overdue = f"XLA took more than {timeout:g} s to read the HLO text"
        if outcome.in_time(overdue) or outcome.answer is None:
            raise outcome.death("XLA's converter", "reading the HLO text")
        return (directory / _OUTPUT).read_bytes()


def _refused(message: str, source: HloText) -> ToolError:
    """What XLA said, at the line that it said it of."""
    where = _WHERE.search(message)
    if where is not None:
        line, column = int(where.group(1)), int(where.group(2))
        line = source.origins[line - 1] if line <= len(source.origins) else line
        return ToolError(
            f"not HLO text that XLA can read: {where.group(3)}", Place(None, line, column)
        )
    named = _NAMED.search(message)
    line = source.line_of_name(named.group(1)) if named else 0
    said = shortened(_STATUS.sub("", first_line(message)))
    place = Place(None, line, 1) if line else None
    return ToolError(f"XLA cannot write this HLO as StableHLO: {said}", place)


def convert(directory: Path, _request: dict[str, Any]) -> dict[str, Any]:
    """In the child: the text in the directory becomes a module of bytecode there.

    Each instruction is marked before, because XLA's converter drops its name and its line.
    """
    from stablehlo_tools import bindings
    from stablehlo_tools.hlo_input.marks import marked

    module = bindings.hlo_text_to_proto((directory / _INPUT).read_text())
    (directory / _OUTPUT).write_bytes(bindings.hlo_proto_to_stablehlo(marked(module)))
    return {}


if __name__ == "__main__":
    child.answer_request(convert)
