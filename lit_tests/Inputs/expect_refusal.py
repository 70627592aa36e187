"""Run a command that must refuse its input, and print what it says on standard error.

    python expect_refusal.py [--absent FILE] COMMAND...

Exits 0 only if the command kept the contract of bad input: exit code 2; one `error:` line, no
traceback and no confession of a bug on standard error; nothing on standard output; FILE neither
there afterwards nor half-written beside its place.
"""

import subprocess
import sys
from pathlib import Path


def broken_promises(finished: subprocess.CompletedProcess[str], absent: Path | None) -> list[str]:
    """What the finished command did against the contract."""
    errors = [line for line in finished.stderr.splitlines() if "error:" in line]
    found = {
        f"exit code {finished.returncode}, not 2": finished.returncode != 2,
        f"{len(errors)} error lines, not 1": len(errors) != 1,
        "a traceback": "Traceback" in finished.stderr,
        "a bug": "a bug in" in finished.stderr,
        "something on standard output": bool(finished.stdout),
    }
    if absent is not None:
        left = [absent, *absent.parent.glob(f".{absent.name}.*")]
        found |= {f"{path.name} is there": path.exists() for path in left}
    return [what for what, broken in found.items() if broken]


def main(arguments: list[str]) -> int:
    """Run the command in `arguments`; return the exit status."""
    absent = None
    if arguments[0] == "--absent":
        absent = Path(arguments[1])
        absent.unlink(missing_ok=True)
        arguments = arguments[2:]
    finished = subprocess.run(arguments, capture_output=True, text=True, check=False)
    print(finished.stderr, end="")
    problems = broken_promises(finished, absent)
    for problem in problems:
        print(f"expect_refusal: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
