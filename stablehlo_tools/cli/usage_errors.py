"""Corrections of a command line that cannot be parsed: the user's words with one fault repaired.

Each correction repairs one fault. `parsers.parse` parses the corrected words again and repairs the
next fault, so that the suggested command has none that the parser knows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from stablehlo_tools.cli.commands import COMMANDS, unknown
from stablehlo_tools.diagnostics import ToolError, nearest, put_right
from stablehlo_tools.passes.parser import parse_pipeline_text
from stablehlo_tools.passes.registry import KNOWN_NAMES

PROGRAM = "stablehlo-tools"
_UNIT = {"m": 60.0, "h": 3600.0}  # in seconds

# Names of other tools. A word in this table means these only: gpu is not a misspelt cpu.
_OTHER_NAMES = {
    **dict.fromkeys(("cpu", "xla:cpu"), ("cpu",)),
    **dict.fromkeys(("gpu", "xla:gpu", "cuda", "nvidia", "rocm"), ("gpu",)),
    **dict.fromkeys(("tpu", "xla:tpu"), ("tpu",)),
    "--pass": ("--pipeline",),
    "--passes": ("--pipeline",),
    "--device": ("--hardware", "--target"),
    "--platform": ("--target",),
    "--backend": ("--target",),
    "--hw": ("--hardware",),
    "--out": ("--output",),
    "--axis": ("--pipeline-axis",),
    "--stages": ("--ranks",),
    "--ranks": ("--stages",),
}
# Values to try, by the metavar in --help.
_EXAMPLES = {
    "SECONDS": "60",
    "FIGURE=NUMBER": "exposed_ns=12000",
    "INDEX=VALUE": "0=1.5",
    "F,B,W,C": "1,1,1,0",
    "A[,K]": "1,0.5",
    "X,T": "0.5,0.1",
    "RTOL": "1e-4",  # as `verify` suggests
    "ATOL": "1e-6",
}
# A shell expands `pass{a=1,b=2},other` into one word for each option: `passa=1,other` is the first.
_EXPANDED = re.compile(
    rf"((?:.*,)?)({'|'.join(sorted(KNOWN_NAMES, key=len, reverse=True))})"
    r"([a-z][a-z-]*=[^,{}]+)((?:,.*)?)"
)


class UsageError(Exception):
    """A fault of a command line, and the words to try instead; none if only the help can tell."""

    def __init__(self, message: str, instead: Sequence[str] = ()) -> None:
        super().__init__(message.removeprefix("argument "))
        self.instead = list(instead)


def unknown_command(words: Sequence[str]) -> UsageError:
    """The error for a first word that names no command."""
    if not words:
        return UsageError("needs a command")
    named = [word for word in words if word in COMMANDS][:1]
    if words[0] == "help":
        return UsageError("no command is called 'help'", [*named, "--help"])
    if words[0].startswith("-"):
        others = [word for word in words if word not in named]
        fault = f"the command comes first, before {words[0]}"
        return UsageError(fault, [*named, *others] if named else ())
    near = nearest(words[0].lower(), COMMANDS)
    return UsageError(unknown(words[0]), [near, *words[1:]] if near else ())


def check_options(words: Sequence[str], options: Mapping[str, argparse.Action]) -> None:
    """Raises UsageError for the first word that names no option.

    argparse reports misspelt options last, and reads `-output FILE` as `-o utput`.
    """
    for word in words:
        name = word.partition("=")[0]
        known = [option for option in options if option.startswith(name)]
        if word == "--" or any(options[each].nargs == argparse.REMAINDER for each in known):
            return
        if known or not re.fullmatch(r"--?[A-Za-z][\w-]*", name):
            continue
        letter = options.get(name[:2])
        has_value = letter is not None and letter.nargs is None  # as in -oFILE
        dashes = "-" if len(name) > 2 and not name.startswith("--") else ""
        near = _nearest_name(dashes + name, options, 0.8 if has_value else 0.6)
        if near or not has_value:
            hint = f"; did you mean {near!r}?" if near else ""
            instead = replace_word(words, name, near) if near else ()
            raise UsageError(f"no option is called {name!r}{hint}", instead)


def check_quotes(words: Sequence[str], options: Iterable[str]) -> None:
    """Raises UsageError for a pipeline without quotes, which a shell split into words."""
    for at, option in enumerate(words, start=1):
        if option not in ("-p", "--pipeline") or option not in options:
            continue
        values = list(itertools.takewhile(lambda word: not word.startswith("-"), words[at:]))
        for end in range(len(values), 1, -1):
            pipeline = " ".join(values[:end])
            parts = [part.groups() for part in map(_EXPANDED.fullmatch, values[:end]) if part]
            if len(parts) == end and len({(part[0], part[1], part[3]) for part in parts}) == 1:
                before, name, _, after = parts[0]
                pipeline = f"{before}{name}{{{' '.join(part[2] for part in parts)}}}{after}"
            if _is_pipeline(pipeline):
                fault = f"a shell split the pipeline into {' and '.join(values[:end])}: quote it"
                raise UsageError(fault, [*words[:at], pipeline, *words[at + end :]])


def _is_pipeline(text: str) -> bool:
    try:
        return all(part.name in KNOWN_NAMES for part in parse_pipeline_text(text))
    except ToolError:
        return False


def extra_words(rest: Sequence[str], words: Sequence[str], options: Iterable[str]) -> UsageError:
    """The error for words that no argument accepts; one may be a pipeline without its -p."""
    kept = [word for word in words if word not in rest]
    at = words.index(rest[0])
    if len(kept) + len(rest) != len(words):  # a word occurs twice, and one of the two is right
        kept = example(words)
    elif "--pipeline" in options and not {"-p", "--pipeline"} & {*words} and _is_pipeline(rest[0]):
        kept = [*words[:at], "-p", *words[at:]]
    return UsageError(f"{' '.join(rest)}: {words[0]} takes no more words", kept)


def example(words: Sequence[str]) -> list[str]:
    """The example of the command, as words."""
    return shlex.split(COMMANDS[words[0]].example)


def add_missing(
    names: Iterable[str], words: Sequence[str], arguments: Sequence[argparse.Action]
) -> list[str]:
    """The words, and for each missing argument its first choice or the value in the example."""
    if len(words) == 1:
        return example(words)
    of_name = {argparse._get_action_name(each): each for each in arguments}  # pyright: ignore[reportPrivateUsage]
    positional = [each for each in arguments if not each.option_strings]
    added: list[str] = []
    for each in map(of_name.__getitem__, names):
        pairs = itertools.pairwise(example(words))
        if not each.option_strings:
            added.append(example(words)[1 + positional.index(each)])
        elif each.choices:
            added += [each.option_strings[-1], str(next(iter(each.choices)))]
        else:
            added += next((pair for pair in pairs if pair[0] in each.option_strings), ())
    return [*words, *added]


def replace_value(argument: argparse.Action, given: str, words: Sequence[str]) -> list[str]:
    """The words with a value that the argument accepts; none if it cannot be guessed."""
    if argument.choices:
        choices = [str(each) for each in argument.choices]
        target = _target_of(given.lower()) if argument.dest == "target" else ""
        if target not in choices:
            near = _nearest_name(given, choices)
            return replace_word(words, given, near) if near else []
        has_hardware = any(word.startswith("--hardware") for word in words)
        hardware = ["--hardware", given.lower()]
        return [] if has_hardware else [*replace_word(words, given, target), *hardware]
    kind = str(argument.metavar or argument.dest.upper())
    values = [_EXAMPLES.get(kind, "4"), "4", "60", "0.5"]
    number = re.search(r"(\d+(?:\.\d+)?)\s*(m|h)?", given)
    if number and kind not in ("RTOL", "ATOL"):  # the 1 of `--rtol -1` accepts any difference
        seconds = f"{float(number[1]) * _UNIT.get(number[2], 1.0):g}"  # 10m is 600 SECONDS
        values.insert(0, seconds if kind == "SECONDS" else number[1])
    read = argument.type if callable(argument.type) else str
    for value in values:
        with contextlib.suppress(argparse.ArgumentTypeError):
            read(value)
            return replace_word(words, given, value)
    return []


def _target_of(word: str) -> str:
    """The target that compiles for the hardware of this name, or ""."""
    from stablehlo_tools.cost.hardware import known_hardware, load_hardware  # only for an error
    from stablehlo_tools.targets.chips import target_of

    target = target_of(load_hardware(word)) if word in known_hardware() else None
    return target.value if target else ""


def _nearest_name(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known option or choice that was probably meant, or ""."""
    bare, word = {each.lstrip("-"): each for each in known if len(each) > 2}, word.lower()
    if word in _OTHER_NAMES:
        return next((each for each in _OTHER_NAMES[word] if each in bare.values()), "")
    word = word.lstrip("-")
    if len(word) == 1:
        return next((bare[each] for each in bare if each.startswith(word)), "")
    return bare.get(nearest(word, bare, cutoff), "")


def replace_word(words: Sequence[str], wrong: str, meant: str) -> list[str]:
    """The words with `meant` instead of `wrong`; none if `wrong` does not occur, or `meant` does.

    A whole word or the value of an option is replaced before a part of a word, such as a pass in a
    pipeline. `ranks=4` may be given as `--ranks=4` or as `--ranks 4`.
    """
    if meant in words and not meant.isdigit():  # no file is meant twice, but two numbers may agree
        return []
    (name, equals, value), other = wrong.partition("="), meant.partition("=")[2]
    whole = re.compile(rf"(\A|\A--[\w-]+={r'|\A--' if equals else ''}){re.escape(wrong)}\Z")
    replaced = (
        [whole.sub(lambda found: found[1] + meant, word) for word in words],
        [put_right(word, wrong, meant) for word in words],
        [
            other if equals and (before, word) == (f"--{name}", value) else word
            for before, word in itertools.pairwise(["", *words])
        ],
    )
    return next((each for each in replaced if each != list(words)), [])


def typed(words: Iterable[str]) -> str:
    """The command line of these words, quoted for a shell."""
    return shlex.join([PROGRAM, *words])
