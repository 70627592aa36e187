"""Errors of a command line that cannot be parsed, with the command to try instead."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from stablehlo_tools.cli.commands import COMMANDS, unknown
from stablehlo_tools.diagnostics import nearest, put_right

PROGRAM = "stablehlo-tools"


class UsageError(Exception):
    """An error of a command line, and the words to try instead; [] without a suggestion."""

    def __init__(self, message: str, instead: Sequence[str] = ()) -> None:
        super().__init__(message.removeprefix("argument "))
        self.instead = list(instead)


def unknown_command(words: Sequence[str]) -> UsageError:
    """Returns the error for a first word that is not a command."""
    if not words:
        return UsageError("needs a command")
    near = nearest(words[0].lower(), COMMANDS)
    return UsageError(unknown(words[0]), [near, *words[1:]] if near else ())


def check_options(words: Sequence[str], options: Mapping[str, argparse.Action]) -> None:
    """Raises UsageError for the first word that is not a known option.

    argparse reports misspelt options last, and reads `-output FILE` as `-o utput`.
    """
    bare = {option.lstrip("-"): option for option in options if option.startswith("--")}
    for word in words:
        name = word.partition("=")[0]
        known = [option for option in options if option.startswith(name)]
        if word == "--" or any(options[each].nargs == argparse.REMAINDER for each in known):
            return
        if known or not re.fullmatch(r"--?[A-Za-z][\w-]*", name):
            continue
        letter = options.get(name[:2])
        has_value = letter is not None and letter.nargs is None  # as in -oFILE
        near = bare.get(nearest(name.lstrip("-").lower(), bare, 0.8 if has_value else 0.6), "")
        if near or not has_value:
            hint = f"; did you mean {near!r}?" if near else ""
            instead = replace_word(words, name, near) if near else ()
            raise UsageError(f"no option is called {name!r}{hint}", instead)


def extra_words(rest: Sequence[str], words: Sequence[str]) -> UsageError:
    """Returns the error for extra words, which may be a pass pipeline split by the shell."""
    split = ": quote the pipeline" if any("{" in word for word in words) else ""
    return UsageError(f"{' '.join(rest)}: {words[0]} takes no further arguments{split}")


def replace_word(words: Sequence[str], wrong: str, meant: str) -> list[str]:
    """Replaces `wrong` by `meant`; returns [] if `wrong` does not occur, or `meant` does.

    A whole word or the value of an option has priority over a part of a word, such as a pass in a
    pass pipeline. `ranks=4` may be given as `--ranks=4` or as `--ranks 4`.
    """
    if meant in words and not meant.isdigit():  # a file is not given twice, but a number may be
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


def command_line(words: Iterable[str]) -> str:
    """Returns the command line of these words, quoted for a shell."""
    return shlex.join([PROGRAM, *words])
