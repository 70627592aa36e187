"""Runs C++ passes in a child process, as some end their process on input they do not support.

    with NativePasses(context) as native:
        module = native.run(module, "sdy-propagation-pipeline")

The process, `python -m stablehlo_tools.passes.native_passes`, reads MLIR bytecode and writes it
back.
"""

from __future__ import annotations

import tempfile
from typing import Any

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.processes.child import Conversation, decoded_error, encoded_error, serve
from stablehlo_tools.processes.ending import death

_MODULE = "stablehlo_tools.passes.native_passes"


class NativePasses:
    """Runs pipelines of registered C++ passes on copies of modules."""

    def __init__(self, context: ir.Context) -> None:
        self._context = context
        self._process: Conversation | None = None

    def __enter__(self) -> NativePasses:
        self._errors = tempfile.TemporaryFile()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.end()
        self._errors.close()

    def run(self, module: ir.Module, *passes: str) -> ir.Module:
        """Returns the module after C++ passes, in the same context.

        Raises ToolError if a pass fails (located), or ends its process.
        """
        # In the process group of this process: Ctrl-C ends both.
        process = self._process = self._process or Conversation(
            _MODULE, stderr=self._errors.fileno(), own_session=False
        )
        try:
            answer, data = process.ask(list(passes), bindings.write_bytecode(module))
        except (OSError, EOFError):
            code, doing = process.exit_code(), f"running {', '.join(passes)}"
            self._errors.seek(0)
            errors = self._errors.read().decode(errors="replace")
            raise death("the compiler's process", code, doing, errors) from None
        if "error" in answer:
            error = decoded_error(answer["error"]).diagnostic
            raise ToolError(error.message, error.place)
        return bindings.parse_module(data, self._context)


def main() -> None:
    """Runs passes on modules until the parent closes the connection."""
    from stablehlo_tools.diagnostics import Diagnostics
    from stablehlo_tools.passes.pipeline import RegisteredPass

    context = bindings.new_context()

    def answer(passes: list[str], data: bytes) -> tuple[Any, bytes]:
        """Returns the module after the passes, each `name{options}`; drops their warnings."""
        module = bindings.parse_module(data, context)
        try:
            for text in passes:
                name, _, options = text.partition("{")
                RegisteredPass(name, options.removesuffix("}")).run(module, Diagnostics())
            return {}, bindings.write_bytecode(module)
        except ToolError as error:
            return {"error": encoded_error(error)}, b""

    serve(answer)


if __name__ == "__main__":
    main()
