"""Exports models, one for each line of standard input: a file name, and the model's arguments.

python exporting.py DIRECTORY
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import export_model


def main(directory: Path, lines: list[str]) -> None:
    """Write each file whole; several processes may do so at once."""
    for number, line in enumerate(lines, start=1):
        name, *words = shlex.split(line)
        print(f"\rexporting {number} of {len(lines)}", end="", file=sys.stderr)
        part = directory / f"{os.getpid()}.{name}"
        export_model.main([*words, "-o", str(part)])
        part.rename(directory / name)
    print(file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.stdin.read().splitlines())
