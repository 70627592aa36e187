"""Runs FileCheck, the one of PyPI that the lit tests are run with, on texts in memory."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout

from stablehlo_tools.diagnostics import ToolError, first_line


def mismatch(checks: str, text: str) -> str | None:
    """What FileCheck has against a text, given the CHECK lines of a test; None where they match.

    Raises ToolError where the package `filecheck` is not installed.
    """
    try:
        from filecheck.finput import FInput
        from filecheck.matcher import Matcher
        from filecheck.options import Options
        from filecheck.parser import Parser, pattern_for_opts
    except ImportError:
        raise ToolError(
            "the tests are checked with the package filecheck, which is not installed: "
            "pip install filecheck"
        ) from None
    options = Options("test")
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        parser = Parser(options, io.StringIO(checks), *pattern_for_opts(options))
        try:
            code = Matcher(options, FInput("output", text), parser).run()
        except RuntimeError as error:  # it ran out of text
            return first_line(str(error))
    return first_line(said.getvalue()) if code else None
