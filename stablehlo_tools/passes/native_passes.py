"""C++ passes in a process of their own: they end it on what they do not know.

    with NativePasses(context) as native:
        module = native.run(module, "sdy-propagation-pipeline")

The process, `python -m stablehlo_tools.passes.native_passes`, reads MLIR bytecode and writes it
back.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Place, ToolError
from stablehlo_tools.processes.child_python import receive, send, with_package
from stablehlo_tools.processes.last_words import how_it_ended, last_words


class NativePasses:
    """Runs pipelines of registered C++ passes on copies of modules."""

    def __init__(self, context: ir.Context) -> None:
        self._context = context
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NativePasses:
        self._said = tempfile.TemporaryFile()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._said.close()

    def run(self, module: ir.Module, *passes: str) -> ir.Module:
        """The module after passes, in the same context.

        Raises a ToolError where a pass fails, located, or ends its process.
        """
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, list(passes), bindings.write_bytecode(module))
            answer, data = receive(process.stdout)
        except (OSError, EOFError):
            raise self._ended(process.wait(), passes) from None
        if "error" in answer:
            raise ToolError(answer["error"], Place(**answer["place"]))
        return bindings.parse_module(data, self._context)

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "stablehlo_tools.passes.native_passes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=with_package(),
        )

    def _ended(self, code: int, passes: tuple[str, ...]) -> ToolError:
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        ended = how_it_ended(code, f"running {', '.join(passes)}")
        return ToolError(f"the compiler's process {ended}", notes=last_words(said))


def main() -> None:
    """Serves requests until the other side closes."""
    from dataclasses import asdict

    from stablehlo_tools.diagnostics import Diagnostics
    from stablehlo_tools.passes.pipeline import RegisteredPass

    context = bindings.new_context()
    while True:
        try:
            passes, data = receive(sys.stdin.buffer)
        except EOFError:
            return
        module = bindings.parse_module(data, context)
        try:
            for text in passes:
                name, _, options = text.partition("{")
                RegisteredPass(name, options.removesuffix("}")).run(module, Diagnostics())
            answer, written = {}, bindings.write_bytecode(module)
        except ToolError as error:
            place = asdict(error.diagnostic.place)
            answer, written = {"error": error.diagnostic.message, "place": place}, b""
        send(sys.stdout.buffer, answer, written)


if __name__ == "__main__":
    main()
