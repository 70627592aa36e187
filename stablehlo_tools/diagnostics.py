"""Located errors, warnings and notes, and the one exception type that carries them.

A location in an exported module is a name (`mlp/psum`) around a stack of Python call sites. People
want the innermost line of their own code. `Place` has that line, its function and the name, and
prints them as `model.py:11 in layer (mlp/psum)`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from stablehlo_tools.bindings import ir

# Control characters except tab and newline, and characters that change the text direction.
_STEERING = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (
        *(code for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (9, 10)),
        *(0x061C, 0x200E, 0x200F, 0x2028, 0x2029),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
    )
}
_INSTEAD = "{1!r} instead of {0!r}"
# Commands, and the calls of this package that do the same.
_IN_PYTHON = (
    (re.compile(r"^stablehlo-tools opt --help (\S+)"), r'print(stablehlo_tools.describe("\1"))'),
    (re.compile(r"^stablehlo-tools opt --list-passes"), "print(stablehlo_tools.describe())"),
    (
        re.compile(r"^stablehlo-tools opt INPUT -p (\S+)( -o \S+)?"),
        r'stablehlo_tools.transform(program, "\1")',
    ),
    (re.compile(r"^the program in another form: -o (\S+)"), r'stablehlo_tools.save(program, "\1")'),
)
_UNNAMED = "<module>"  # printed before a line and column if the input has no name
_TEXT_BUFFER = "-"  # the file name MLIR gives to text parsed from memory


def printable(text: str) -> str:
    """Returns the text with escapes for characters that control a terminal or hide text."""
    return text.translate(_STEERING)


class Severity(enum.Enum):
    """The severity of a diagnostic; only an error ends a run."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Place:
    """A source position. If `file` is None, it is `line`:`column` of the input itself."""

    file: str | None = None
    line: int = 0
    column: int = 0
    function: str = ""
    name: str = ""

    def render(self, input_name: str) -> str:
        """Returns `model.mlir:3:5`, `model.py:11 in layer (mlp/psum)`, or only the input's name."""
        if self.file is None:
            if not self.line:
                return input_name + (f" ({self.name})" if self.name else "")
            text = f"{input_name}:{self.line}:{self.column}"
        else:
            text = f"{self.file}:{self.line}"
        if self.function:
            text += f" in {self.function}"
        return text + (f" ({self.name})" if self.name else "")


@dataclass(frozen=True)
class Diagnostic:
    """One message at one place, with the notes that explain it."""

    severity: Severity
    message: str
    place: Place = Place()
    notes: tuple[Diagnostic, ...] = ()
    settled_by: str = ""  # the pass that it asks for: dropped if that pass runs later
    in_vain_before: str = ""  # the pass after which this must run: refused if that runs later
    hint: str = ""  # a command or a change to try
    # The given word and the likely one: first try the same command with that.
    instead: tuple[str, str] | None = None
    added: tuple[str, ...] = ()  # words to append to the same command, to try

    def render(self, input_name: str, unsaid: Severity | None = None) -> str:
        """Returns `PLACE: error: MESSAGE` in one line, a line for each note, and one for the hint.

        Leaves out PLACE if unknown, and the severity `unsaid`, which the caller prints itself.
        """
        has_place = input_name != _UNNAMED or self.place != Place()
        place = f"{self.place.render(input_name)}: " if has_place else ""
        severity = "" if self.severity is unsaid else f"{self.severity.value}: "
        lines = [f"{place}{severity}{self.message}"]
        lines += [note.render(input_name) for note in self.notes]
        lines += [f"try: {self.hint}"] if self.hint else []
        return printable("\n".join(lines))


def render_diagnostics(
    diagnostics: Iterable[Diagnostic], input_name: str, unsaid: Severity | None = None
) -> list[str]:
    """Returns the texts of diagnostics, in order and without duplicates.

    Six ops on one line of the model may give equal texts.
    """
    return list(dict.fromkeys(each.render(input_name, unsaid) for each in diagnostics))


class ToolError(Exception):
    """The exception of every refusal: its message, place and broken rule, and what to try.

    `hint` is a command to try, or advice in a few words, if there is any. `instead` is the given
    word and the likely one. `added` are the words that a command line lacks, an option and its
    value.

    `by_chance`: the machine was short of memory or time, and another try may succeed.
    """

    def __init__(
        self,
        message: str,
        location: ir.Location | Place | None = None,
        notes: tuple[Diagnostic, ...] = (),
        hint: str = "",
        instead: tuple[str, str] | None = None,
        added: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        place = to_place(location)
        if instead is not None and not hint:
            hint = _INSTEAD.format(*instead)
        if added and not hint:
            hint = " ".join(added)
        self.diagnostic = Diagnostic(
            Severity.ERROR, message, place, notes, hint=hint, instead=instead, added=added
        )
        self.input_name: str | None = None
        self.by_chance = False

    def __str__(self) -> str:
        """Returns the text that Python prints, with a Python call in place of a command to try."""
        told = self.diagnostic
        hint = told.hint if told.instead is None else _INSTEAD.format(*told.instead)
        for command, call in _IN_PYTHON:
            hint = command.sub(call, hint)
        return replace(told, hint=hint).render(self.input_name or _UNNAMED)


@dataclass
class Diagnostics:
    """A collection of passes' diagnostics that do not end the run."""

    collected: list[Diagnostic] = field(default_factory=list[Diagnostic])

    def warn(self, message: str, location: ir.Location | Place | None = None) -> None:
        """Records a warning at a location."""
        self.collected.append(Diagnostic(Severity.WARNING, message, to_place(location)))

    def settle(self, name: str) -> None:
        """Drops the diagnostics that asked for the pass that has just run."""
        self.collected[:] = [each for each in self.collected if each.settled_by != name]


def note(message: str, location: ir.Location | Place | None = None) -> Diagnostic:
    """Creates a note, to attach to an error or a warning."""
    return Diagnostic(Severity.NOTE, message, to_place(location))


def warning(message: str, location: ir.Location | Place | None = None) -> Diagnostic:
    """Creates a warning without collecting it."""
    return Diagnostic(Severity.WARNING, message, to_place(location))


def to_place(location: ir.Location | Place | None) -> Place:
    """Decodes an MLIR location; JAX's locations nest as name(callsite(name(file) at …))."""
    if location is None:
        return Place()
    if isinstance(location, Place):
        return location
    from stablehlo_tools.bindings import ir

    if type(location) is ir.Location:  # a diagnostic's location arrives without its subclass
        location = ir.Location.from_attr(location.attr, location.context)
    if isinstance(location, ir.FileLineColLoc):
        file = None if location.filename == _TEXT_BUFFER else location.filename
        return Place(file, location.start_line, location.start_col)
    if isinstance(location, ir.CallSiteLoc):
        return to_place(location.callee)
    if isinstance(location, ir.NameLoc):
        # The innermost name is the function, the next one the op's name.
        name, inner = location.name_str.rstrip(":"), to_place(location.child_loc)
        is_function = inner.file is not None and not inner.function
        return replace(inner, function=name) if is_function else replace(inner, name=name)
    if isinstance(location, ir.FusedLoc):
        places = [to_place(part) for part in location.locations if isinstance(part, ir.Location)]
        return next((place for place in places if place != Place()), Place())
    return Place()


def frames_of(location: ir.Location) -> list[Place]:
    """Returns the call stack of an MLIR location, innermost first: the user's lines of an op."""
    from stablehlo_tools.bindings import ir

    if isinstance(location, ir.CallSiteLoc):
        return [*frames_of(location.callee), *frames_of(location.caller)]
    if isinstance(location, ir.NameLoc) and isinstance(location.child_loc, ir.CallSiteLoc):
        return frames_of(location.child_loc)  # the name is the op's
    if isinstance(location, ir.FusedLoc):
        stacks = [frames_of(part) for part in location.locations if isinstance(part, ir.Location)]
        return next(filter(None, stacks), [])
    place = to_place(location)
    return [] if place.file is None else [place]


def from_mlir_error(error: ir.MLIRError, prefix: str = "") -> ToolError:
    """Converts the first diagnostic of an MLIR failure to a ToolError, with its notes."""
    found = error.error_diagnostics
    if not found:
        return ToolError(prefix + first_line(str(error)))
    first = found[0]
    notes = tuple(
        note(first_line(part.message), part.location)
        for part in first.notes
        if not part.message.startswith("see current operation")
    )
    return ToolError(prefix + first_line(first.message), first.location, notes)


def first_line(text: str) -> str:
    """Returns the first nonblank line of a message."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown error")


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the known word that was probably meant; "" if none is similar enough.

    `cutoff` is difflib's, at most 1. Also finds words with the same letters in another order:
    difflib gives a swap in four letters (1b1f) only about one half.
    """
    import difflib  # only for an error

    words = list(known)
    close = difflib.get_close_matches(word, words, 1, cutoff)
    swapped = (each for each in words if sorted(each) == sorted(word))
    return next(iter(close), "") or next(swapped, "")


def put_right(text: str, wrong: str, meant: str) -> str:
    """Replaces the wrong word in a text by the one that was meant; matches whole words only."""
    found = re.compile(rf"(\A|[^\w-]){re.escape(wrong)}(?![\w-])")
    return found.sub(lambda each: each[1] + meant, text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `did you mean 'h100'?`; "" if no known word is similar."""
    close = nearest(word, known)
    return f"did you mean {close!r}?" if close else ""


@contextmanager
def naming(input_name: str) -> Generator[None]:
    """Sets the input's name on a ToolError raised in the context, if it has none."""
    try:
        yield
    except ToolError as error:
        error.input_name = error.input_name or input_name
        raise


@contextmanager
def capture_diagnostics(context: ir.Context) -> Generator[list[Diagnostic]]:
    """Collects the diagnostics of C++ code in the context, instead of printing them to stderr."""
    collected: list[Diagnostic] = []

    def handle(diagnostic: ir.Diagnostic) -> bool:
        from stablehlo_tools.bindings import ir

        severity = {
            ir.DiagnosticSeverity.ERROR: Severity.ERROR,
            ir.DiagnosticSeverity.WARNING: Severity.WARNING,
        }.get(diagnostic.severity, Severity.NOTE)
        collected.append(
            Diagnostic(severity, first_line(diagnostic.message), to_place(diagnostic.location))
        )
        return True

    handler = cast("ir.DiagnosticHandler", context.attach_diagnostic_handler(handle))
    try:
        yield collected
    finally:
        handler.detach()


def installing(extra: str) -> str:
    """Returns the command that installs an extra, in a clone: no index has the package."""
    return f"pip install '.[{extra}]'  # in a clone of stablehlo-tools"


GIB = 2.0**30
# Units of printed figures, which have three digits.
_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))
_SIZES = ((2.0**40, "TiB"), (GIB, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def duration(ns: float) -> str:
    """Formats nanoseconds: `12.4 ms`."""
    return _format_amount(ns, _TIMES)


def size(count: float) -> str:
    """Formats bytes: `1.53 GiB`."""
    return _format_amount(count, _SIZES)


def share(part: float, whole: float) -> str:
    """Formats a share: `31 %`; `-` if the whole is zero."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def table_lines(
    rows: Sequence[Sequence[str]],
    left: Collection[str] = (),
    gap: str = "  ",
    width: int | None = None,
    spare: Sequence[str] = (),
) -> list[str]:
    """Returns the lines of a table; the first row has the headings, `left` those to align left.

    If the table is wider than `width`, columns of `spare` are left out, the first ones first."""
    lines = _align_rows(rows, left, gap)
    for heading in spare:
        if width is None or max(map(len, lines)) <= width:
            break
        out = rows[0].index(heading)
        rows = [[*row[:out], *row[out + 1 :]] for row in rows]
        lines = _align_rows(rows, left, gap)
    return lines


def _align_rows(rows: Sequence[Sequence[str]], left: Collection[str], gap: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if heading in left else ">" for heading in rows[0]]
    return [gap.join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in rows]


def _format_amount(amount: float, units: tuple[tuple[float, str], ...]) -> str:
    factor, unit = next(
        ((factor, unit) for factor, unit in units if amount >= factor * 0.9995), units[-1]
    )
    value = amount / factor
    digits = 0 if value >= 99.95 or not value else 1 if value >= 9.995 else 2
    if factor == 1.0 and value == int(value):
        digits = 0
    return f"{value:.{digits}f} {unit}"
