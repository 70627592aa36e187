"""Write a model to a file.

    python export_model.py NAME -o FILE.jax_export [--option=value ...]
    python export_model.py NAME --full -o FILE.jax_export
    python export_model.py --list

Options are those of the model's builder: `llama --layers=4 --scan-layers=true
--platforms=cpu,cuda`. `--full` gives the size of a published model, for 64 devices, where there is
one; it needs neither the devices nor the memory. A file `.mlir` gets the module as text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `models`

from models.zoo import MODELS, Model


def main(words: Sequence[str] | None = None) -> None:
    """Writes the file, or ends with a usage message and exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", metavar="NAME", choices=MODELS, help="see --list")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print the models and their options")
    parser.add_argument("--full", action="store_true", help="the size of a published model")
    arguments, rest = parser.parse_known_args(words)
    if arguments.list:
        print("\n".join(_listing()))
        return
    if arguments.name is None or arguments.output is None:
        parser.error("a NAME and -o FILE are needed")
    model = MODELS[arguments.name]
    try:
        options = dict(_option(model, word) for word in rest)
        data = encoded(model, options, arguments.output.suffix, full=arguments.full)
    except ValueError as error:
        parser.error(str(error))
    arguments.output.write_bytes(data)


def encoded(model: Model, options: dict[str, Any], suffix: str, *, full: bool = False) -> bytes:
    """The model's bytes in the form of a suffix, `.jax_export` or `.mlir`."""
    if suffix not in (".jax_export", ".mlir"):
        raise ValueError(f"the suffix {suffix!r} is neither .jax_export nor .mlir")
    built = model.full(**options) if full else model.build(**options)
    if isinstance(built, str):
        if suffix != ".mlir":
            raise ValueError(f"{model.name} is MLIR text: use -o NAME.mlir")
        return built.encode()
    return built.mlir_module().encode() if suffix == ".mlir" else bytes(built.serialize())


def _listing() -> Iterator[str]:
    """A line for each model with its options, under a line for each family of the zoo.

    Options that a whole family has by the same default stand in its line.
    """
    for family, group in groupby(MODELS.values(), key=lambda model: model.family):
        models = list(group)
        shared = dict(models[0].options) if family else {}
        for model in models:
            shared = {n: v for n, v in shared.items() if model.options.get(n) == v}
        if family:
            yield " ".join([f"{family}:", *_assignments(shared)])
        for model in models:
            own = {name: value for name, value in model.options.items() if name not in shared}
            yield " ".join([f"{'  ' * bool(family)}{model.name}", *_assignments(own)])


def _assignments(options: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


def _option(model: Model, word: str) -> tuple[str, Any]:
    """`--scan-layers=true` as a name and a value of the type that its default has."""
    name, equals, text = word.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if not word.startswith("--") or not equals or name not in model.options:
        known = ", ".join(model.options) or "none"
        raise ValueError(f"{word!r} is no --option=value of {model.name}; its options: {known}")
    default = model.options[name]
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ValueError(f"--{name} must be true or false, not {text!r}")
        return name, text == "true"
    several = isinstance(default, tuple)
    kind = type(default[0] if several else default)
    try:
        return name, tuple(map(kind, text.split(","))) if several else kind(text)
    except ValueError:
        raise ValueError(f"--{name} takes {kind.__name__}, not {text!r}") from None


if __name__ == "__main__":
    main()
