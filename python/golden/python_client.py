"""The `python` of RUN lines: exports a model once, and keeps it.

`session.py` writes this file out as the command `python`; anything but `export_model.py` goes to
the true interpreter.
"""

import posix
import sys

PYTHON = ""  # the true one
KEPT = ""  # the directory of exported models


def main() -> int:
    """Copy the model that was exported with these arguments before, or export it."""
    arguments = sys.argv[1:]
    if not (arguments and arguments[0].endswith("/export_model.py")) or arguments[-2] != "-o":
        posix.execv(PYTHON, [PYTHON, *arguments])
    output = arguments[-1]
    suffix = output[output.rindex(".") :]
    words = "_".join(arguments[1:-2])
    kept = KEPT + "/" + "".join(c if c.isalnum() or c in "-=.," else "_" for c in words) + suffix
    try:
        with open(kept, "rb") as file:  # noqa: PTH123  pathlib takes too long to load
            data = file.read()
    except FileNotFoundError:
        import subprocess

        part = f"{kept}.{posix.getpid()}{suffix}"
        status = subprocess.run([PYTHON, *arguments[:-1], part], check=False).returncode
        if status:
            return status
        posix.rename(part, kept)
        with open(kept, "rb") as file:  # noqa: PTH123
            data = file.read()
    with open(output, "wb") as file:  # noqa: PTH123
        file.write(data)
    return 0


if __name__ == "__main__":
    posix._exit(main())
