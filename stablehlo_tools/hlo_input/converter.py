"""XLA's converter, in a process of its own: `python -m stablehlo_tools.hlo_input.converter DIR`.

DIR holds `module.hlo`; what is left there is `module.mlirbc`, or `error.json`. XLA's parser and
converter end their process on some texts that they do not understand.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from stablehlo_tools.diagnostics import Place, ToolError, first_line
from stablehlo_tools.hlo_input.text import HloText
from stablehlo_tools.processes.child import end_with_parent, wait_or_end, with_package
from stablehlo_tools.processes.ending import how_it_ended, last_words, shortened

_INPUT, _OUTPUT, _ERROR = "module.hlo", "module.mlirbc", "error.json"
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
        with (directory / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(directory)],
                env={**with_package(), "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            code = wait_or_end(process, timeout)
        if (directory / _ERROR).exists():
            raise _refused(json.loads((directory / _ERROR).read_text()), source)
        if code is None:
            raise ToolError(f"XLA took more than {timeout:g} s to read the HLO text")
        if code or not (directory / _OUTPUT).exists():
            said = (directory / "stderr").read_text(errors="replace")
            raise ToolError(
                f"XLA's converter {how_it_ended(code, 'reading the HLO text')}",
                notes=last_words(said),
            )
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


def main(directory: Path) -> None:
    """Converts the text in the directory and leaves the module there."""
    end_with_parent(os.getppid())
    from stablehlo_tools import bindings
    from stablehlo_tools.hlo_input.marks import marked

    try:
        module = bindings.hlo_text_to_proto((directory / _INPUT).read_text())
        (directory / _OUTPUT).write_bytes(bindings.hlo_proto_to_stablehlo(marked(module)))
    except Exception as error:  # XLA's errors are of several private types
        (directory / _ERROR).write_text(json.dumps(str(error) or type(error).__name__))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
