"""What is said of a command line that cannot be taken: one line, and a command to try.

argparse finds what is wrong and says it in words of its own; here it becomes what was given, what
is wanted, and, where that can be told, the same command line with the word that was meant.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stablehlo_tools.cli.commands import COMMANDS, unknown
from stablehlo_tools.diagnostics import ToolError, nearest, put_right
from stablehlo_tools.passes.parser import parse_pipeline_text
from stablehlo_tools.passes.registry import NAMED, PASSES

PROGRAM = "stablehlo-tools"
_OF_ARGUMENT = re.compile(r"argument (?P<name>[^:]+): (?P<said>.*)", re.DOTALL)
_NO_CHOICE = re.compile(r"invalid choice: '(?P<word>.*)' \(choose from ", re.DOTALL)
_NO_VALUE = re.compile(r"expected (one|at least one|\d+) argument")
_NO_FLAG = re.compile(r"ignored explicit argument")
_OF_TYPE = re.compile(r"invalid (?P<type>\w+) value: (?P<word>.*)", re.DOTALL)
_MISSING = re.compile(r"the following arguments are required: (?P<names>.*)")
_AMBIGUOUS = re.compile(r"ambiguous option: (?P<word>\S+) could match (?P<options>.*)")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*(m|h)?")
_SECONDS = {None: 1.0, "m": 60.0, "h": 3600.0}

_TARGETS = ("cpu", "gpu", "tpu")  # no one of them is another, misspelt

# What other tools, or people, call what has another name here.
_OTHER_NAMES = {
    "cuda": ("gpu",),
    "nvidia": ("gpu",),
    "rocm": ("gpu",),
    "xla:cpu": ("cpu",),
    "xla:gpu": ("gpu",),
    "xla:tpu": ("tpu",),
    "--pass": ("--pipeline",),
    "--pas": ("--pipeline",),
    "--passes": ("--pipeline",),
    "--device": ("--hardware", "--target"),
    "--platform": ("--target",),
    "--backend": ("--target",),
    "-hw": ("--hardware",),
    "--hw": ("--hardware",),
    "--out": ("--output",),
    "--axis": ("--pipeline-axis",),
    "--stages": ("--ranks",),
    "--ranks": ("--stages",),
}
# By the name that stands for a value in --help.
_EXAMPLES = {
    "SECONDS": "60",
    "GIB": "40",
    "FIGURE=NUMBER": "exposed_ns=12000",
    "INDEX=VALUE": "0=1.5",
    "F,B,W,C": "1,1,1,0",
    "A[,K]": "1,0.5",
    "X,T": "0.5,0.1",
}
_NUMBERS = ("4", "60", "0.5")
_TOLERANCES = {"RTOL": "1e-4", "ATOL": "1e-6"}  # as `verify` suggests them itself
_ALIKE = 0.8  # of a word that an option with a value behind it, as `-oFILE`, could be as well
# A word that a shell makes of `pass{option=value,option=value},pass`: it has one of the options.
_EXPANDED = re.compile(
    rf"(?P<front>(?:.*,)?)(?P<name>{'|'.join(sorted([*PASSES, *NAMED], key=len, reverse=True))})"
    r"(?P<option>[a-z][a-z-]*=[^,{}]+)(?P<behind>(?:,.*)?)"
)


@dataclass(frozen=True)
class CommandLine:
    """The words of a command line, the arguments of its command, and an example of that."""

    words: Sequence[str]
    arguments: Sequence[argparse.Action]
    command: str  # with the program in front
    example: str

    @property
    def help(self) -> str:
        """What prints what the command takes."""
        return f"{self.command} --help"

    @property
    def options(self) -> list[str]:
        """The names of all options."""
        return [name for each in self.arguments for name in each.option_strings]

    def named(self, name: str) -> argparse.Action | None:
        """The argument that argparse calls so: `-o/--output`, or INPUT."""
        for each in self.arguments:
            spelled = each.option_strings
            if name in ("/".join(spelled), *spelled, each.metavar, each.dest):
                return each
        return None


def explained(message: str, line: CommandLine) -> tuple[str, str]:
    """What argparse says, in words of this tool, and what to try."""
    missing, ambiguous = _MISSING.match(message), _AMBIGUOUS.match(message)
    if missing:
        names = missing["names"].split(", ")
        stray = next((word for word in line.words if _meant_of(word, line, names)), None)
        return _unknown(stray, line, names) if stray else _missing(names, line)
    if ambiguous:
        options = ambiguous["options"].split(", ")
        return f"{ambiguous['word']} may be {' or '.join(options)}", line.help
    of_argument = _OF_ARGUMENT.match(message)
    argument = line.named(of_argument["name"]) if of_argument else None
    if of_argument is None or argument is None:
        return message, line.help
    return _of_argument(argument, of_argument["said"], line)


def unknown_command(words: Sequence[str]) -> tuple[str, str]:
    """What is said where the first word is no command."""
    behind = [word for word in words if word in COMMANDS]
    if words[0] == "help":
        return "no command is called 'help'", " ".join([PROGRAM, *behind[:1], "--help"])
    if words[0].startswith("-"):
        rest = [word for word in words if word not in behind[:1]]
        tried = typed([behind[0], *rest]) if behind else f"{PROGRAM} --help"
        return f"a command stands first, in front of {words[0]}", tried
    meant = nearest(words[0].lower(), COMMANDS)
    return unknown(words[0]), typed([meant, *words[1:]]) if meant else f"{PROGRAM} --help"


def unknown_words(words: Sequence[str], line: CommandLine) -> tuple[str, str]:
    """What is said of words that nothing takes: perhaps another option was meant."""
    option = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
    if not option:
        wanted = [_title(each) for each in line.arguments if not each.option_strings]
        taken = " ".join(wanted) or "no words beside its options"
        is_once = all(line.words.count(word) == 1 for word in words)
        kept = [word for word in line.words if word not in words]
        tried = typed(kept) if is_once else line.example
        if len(words) == 1 and is_once:
            tried = _as_pipeline(words[0], line) or tried
        return f"{' '.join(words)} is too much: {line.command} takes {taken}", tried
    return _unknown(option, line, line.options)


def _as_pipeline(word: str, line: CommandLine) -> str:
    """The command with a word as its pipeline; empty where it is none, or there is one already."""
    if line.named("--pipeline") is None or {"-p", "--pipeline"} & set(line.words):
        return ""
    try:
        parts = parse_pipeline_text(word)
    except ToolError:
        return ""
    if not all(part.name in PASSES for part in parts):
        return ""
    at = line.words.index(word)
    return typed([*line.words[:at], "-p", *line.words[at:]])


def _unknown(word: str, line: CommandLine, options: Iterable[str]) -> tuple[str, str]:
    """What is said of an option that there is not, and may be one of others."""
    option = word.partition("=")[0]
    meant = _meant(option, options)
    hint = f"; did you mean {meant!r}?" if meant else ""
    words = _choosing(line.words, option, line.named(meant)) if meant else []
    return f"no option is called {option!r}{hint}", retyped(words, option, meant) or line.help


def taken_apart(line: CommandLine) -> tuple[str, str] | None:
    """What is said of a pipeline without quotes, which a shell took apart: at its spaces, or in a
    word for each of the options that stand with commas in braces."""
    words, named = line.words, line.named("--pipeline")
    for at, option in enumerate(words):
        if named is None or option not in named.option_strings:
            continue
        behind = list(itertools.takewhile(lambda w: not w.startswith("-"), words[at + 1 :]))
        for count in range(2, len(behind) + 1):
            pipeline = _put_together(behind[:count])
            if pipeline:
                tried = typed([*words[: at + 1], pipeline, *words[at + 1 + count :]])
                apart = " and ".join(behind[:count])
                return f"a shell made {apart} of the pipeline: put it in quotes", tried
    return None


def _put_together(words: Sequence[str]) -> str:
    """The pipeline that a shell made these words of; empty where there is none."""
    expanded = [_EXPANDED.fullmatch(word) for word in words]
    if all(expanded):
        of_each = [each.groupdict() for each in expanded if each]
        options = " ".join(each.pop("option") for each in of_each)
        first = of_each[0]
        alike = all(each == first for each in of_each)
        return f"{first['front']}{first['name']}{{{options}}}{first['behind']}" if alike else ""
    opened = [word.count("{") - word.count("}") for word in words]
    if opened[0] > 0 and not sum(opened):
        return " ".join(words)
    *before, last = words
    is_behind_commas = all(word.endswith(",") for word in before) and _begins_with_pass(last)
    is_behind_name = len(words) == 2 and last.startswith("{") and not any(opened)
    return "".join(words) if is_behind_commas or is_behind_name else ""


def _begins_with_pass(word: str) -> bool:
    name = re.match(r"[\w-]*", word)
    return name is not None and name[0] in {*PASSES, *NAMED} and not word.endswith(",")


def with_one_dash(line: CommandLine) -> str:
    """The first word that names an option behind one dash, as `-hardware` does; argparse would take
    it for `-h` and more."""
    behind = line.words[: line.words.index("--")] if "--" in line.words else line.words
    for word in behind:
        name = word.partition("=")[0]
        if not re.match(r"-[a-z][a-z-]+", name):
            continue
        letter = line.named(name[:2])
        takes_rest = letter is not None and letter.nargs is None  # -oFILE
        meant = nearest(f"-{name}", line.options, _ALIKE) if takes_rest else _meant_of(name, line)
        if f"-{name}" in line.options or meant:
            return name
    return ""


def retyped(words: Sequence[str], wrong: str, meant: str) -> str:
    """The command line with the word that was meant; empty where the wrong one is not in it, or the
    other is: nobody means one file twice, but numbers may be alike.

    Only where no word, and no value behind `=`, is the wrong one, is it looked for within words, as
    in a pipeline; `ranks=4` may be `--ranks 4` or `--ranks=4` as well.
    """
    if meant in words and not meant.isdigit():
        return ""
    whole = re.compile(rf"(\A|\A--[\w-]+=){re.escape(wrong)}\Z")
    changed = [whole.sub(lambda found: found[1] + meant, word) for word in words]
    if changed == list(words):
        changed = [put_right(word, wrong, meant) for word in words]
    if changed != list(words):
        return typed(changed)
    (name, _, value), other = wrong.partition("="), meant.partition("=")[2]
    changed = [f"--{meant}" if value and word == f"--{wrong}" else word for word in words]
    if changed != list(words):
        return typed(changed)
    changed = [
        other if value and (before, word) == (f"--{name}", value) else word
        for before, word in itertools.pairwise(["", *words])
    ]
    return typed(changed) if changed != list(words) else ""


def typed(words: Sequence[str]) -> str:
    """A command line of these words, as a shell takes it."""
    return shlex.join([PROGRAM, *words])


def _meant(word: str, known: Iterable[str]) -> str:
    """The known word that was meant; empty where none is like this one, or where it is right
    elsewhere."""
    known = [each for each in known if len(each) > 2]  # -h is near every short word
    if word in _TARGETS:
        return ""
    others = [each for each in _OTHER_NAMES.get(word.lower(), ()) if each in known]
    if re.fullmatch(r"-\w", word):  # one letter is near every option
        alike = [each for each in known if each.startswith(f"-{word}")]
        others += alike if len(alike) == 1 else []
        return next(iter(others), "")
    bare = {each.lstrip("-"): each for each in known}  # dashes are alike in all of them
    return next(iter(others), "") or bare.get(nearest(word.lower().lstrip("-"), bare), "")


def _meant_of(word: str, line: CommandLine, options: Iterable[str] | None = None) -> str:
    """The option that was meant by a word that is none, with or without a value in it: one of all,
    or of some."""
    name = word.partition("=")[0]
    is_none = name.startswith("-") and not any(each.startswith(name) for each in line.options)
    return _meant(name, line.options if options is None else options) if is_none else ""


def _choosing(words: Sequence[str], option: str, meant: argparse.Action | None) -> list[str]:
    """The words with the choice that was meant behind an option, which is called otherwise; none
    where no choice is like the one that was given."""
    choices = [str(each) for each in (meant.choices if meant else None) or ()]
    changed = list(words)
    for at, word in enumerate(words):
        name, equals, given = word.partition("=")
        value = given if equals else "".join(words[at + 1 : at + 2])
        if name != option or not choices or value in choices:
            continue
        near = _meant(value, choices)
        if not near:
            return []
        changed[at if equals else at + 1] = f"{name}={near}" if equals else near
    return changed


def _missing(names: Sequence[str], line: CommandLine) -> tuple[str, str]:
    """Arguments that must be there, added to what was typed: a choice, or the word that the example
    of the command has there."""
    found = [line.named(name) for name in names]
    told = [name if each is None else _title(each) for name, each in zip(names, found, strict=True)]
    added: list[str] = []
    for each in found:
        words = [] if each is None else _as_in_example(each, line)
        if not words:
            return f"needs {', '.join(told)}", line.example or line.help
        added += words
    return f"needs {', '.join(told)}", typed([*line.words, *added])


def _as_in_example(argument: argparse.Action, line: CommandLine) -> list[str]:
    """What gives an argument: its first choice, or the words of it in the example; none where that
    has none, or where it is the first word that the command takes."""
    if argument.option_strings and argument.choices:
        return [argument.option_strings[-1], str(next(iter(argument.choices)))]
    words = shlex.split(line.example)[len(line.command.split()) :]
    if argument.option_strings:
        pairs = itertools.pairwise(words)
        return next(([n, value] for n, value in pairs if n in argument.option_strings), [])
    in_front = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    place = [each for each in line.arguments if not each.option_strings].index(argument)
    return in_front[place : place + 1] if place else []


def _of_argument(argument: argparse.Action, said: str, line: CommandLine) -> tuple[str, str]:
    title = argument.option_strings[-1] if argument.option_strings else _title(argument)
    no_choice, of_type = _NO_CHOICE.match(said), _OF_TYPE.match(said)
    if no_choice:
        return _no_choice(title, no_choice["word"], argument, line)
    if _NO_VALUE.match(said):
        return f"{title} needs a value, {_value_of(argument)}", line.help
    if _NO_FLAG.match(said):
        return f"{title} takes no value", line.help
    if of_type:
        kind = {"int": "a whole number", "float": "a number"}.get(of_type["type"], "a value")
        said = f"{of_type['word']} is not {kind}"
    return f"{title}: {said}", _with_value_that_fits(argument, line)


def _no_choice(
    title: str, word: str, argument: argparse.Action, line: CommandLine
) -> tuple[str, str]:
    choices = [str(each) for each in argument.choices or ()]
    listed = ", ".join(choices)
    target = _target_of(word.lower()) if title == "--target" else ""
    is_given = any(each.startswith("--hardware") for each in line.words)
    if target in choices and "--hardware" in line.options and not is_given:
        hint, tried = f"; {word} is hardware", retyped(line.words, word, target)
        tried = f"{tried} --hardware {word.lower()}" if tried else ""
    else:
        meant = _meant(word, choices)
        hint = f"; did you mean {meant!r}?" if meant else ""
        tried = retyped(line.words, word, meant) if meant else ""
    return f"{title} is one of {listed}, not {word!r}{hint}", tried or line.help


def _target_of(word: str) -> str:
    """The target that compiles for the hardware of this name; empty where there is none."""
    from stablehlo_tools.cost.hardware import known_hardware, load_hardware  # only for an error
    from stablehlo_tools.targets.chips import target_of

    target = target_of(load_hardware(word)) if word in known_hardware() else None
    return target.value if target else ""


def _with_value_that_fits(argument: argparse.Action, line: CommandLine) -> str:
    """The command line with a value that the option takes: the number in the one that was given,
    or an example."""
    given = next(
        (word for word in _values(argument, line.words) if not _is_taken(word, argument.type)), None
    )
    if given is None:
        return line.help
    for example in (*_number_in(given, _value_of(argument)), *_NUMBERS):
        if _is_taken(example, argument.type):
            return retyped(line.words, given, example) or line.help
    return line.help


def _number_in(given: str, value: str) -> Iterable[str]:
    """The number in a word, in the unit of the option: `10m` is 600 SECONDS; and its example.

    Of a tolerance the example alone: the 1 of `-1` would let any two programs be the same."""
    if value in _TOLERANCES:
        yield _TOLERANCES[value]
        return
    number = _NUMBER.search(given)
    if number:
        yield f"{float(number[1]) * _SECONDS[number[2]]:g}" if value == "SECONDS" else number[1]
    if value in _EXAMPLES:
        yield _EXAMPLES[value]


def _values(argument: argparse.Action, words: Sequence[str]) -> Iterable[str]:
    """The words that may be values of an argument."""
    if not argument.option_strings:
        yield from words
        return
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if any(each.startswith(name) and len(name) > 1 for each in argument.option_strings):
            yield value if equals else after


def _is_taken(word: str, read: object) -> bool:
    if not callable(read):
        return True
    try:
        value = read(word)
    except (argparse.ArgumentTypeError, ValueError, TypeError):
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _title(argument: argparse.Action) -> str:
    return argument.option_strings[-1] if argument.option_strings else _value_of(argument)


def _value_of(argument: argparse.Action) -> str:
    metavar = argument.metavar
    if isinstance(metavar, str):
        return metavar
    choices = ", ".join(map(str, argument.choices or ()))
    return f"one of {choices}" if choices else argument.dest.upper()
