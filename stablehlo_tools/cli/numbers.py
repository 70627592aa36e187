"""Numbers on the command line, for argparse."""

from __future__ import annotations

import argparse
import math


def whole_number(text: str, least: int = 0) -> int:
    """A whole number that is not too small."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return number


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return whole_number(text, least=1)


def tolerance(text: str) -> float:
    """A finite number of 0 or more."""
    number = any_number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a tolerance of 0 or more")
    return number


def assignment(text: str) -> tuple[int, float]:
    """`3=0.5`: an input by its index, and a value."""
    index, equals, value = text.partition("=")
    if not equals or not index.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not INDEX=VALUE")
    return int(index), any_number(value)


def add_set_argument(parser: argparse.ArgumentParser) -> None:
    """`--set INDEX=VALUE`, as often as one likes."""
    parser.add_argument(
        "--set",
        metavar="INDEX=VALUE",
        type=assignment,
        action="append",
        default=[],
        help="give input INDEX this value in every element, instead of random ones",
    )


def any_number(text: str) -> float:
    """A number; not finite ones too."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
