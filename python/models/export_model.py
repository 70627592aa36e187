"""Write a model to a file.

    python export_model.py NAME -o FILE.jax_export [--option=value ...]
    python export_model.py --list

Options are those of the model's builder: `llama --layers=4 --scan-layers=true
--platforms=cpu,cuda`. A file `.mlir` gets the module as text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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
    arguments, rest = parser.parse_known_args(words)
    if arguments.list:
        for model in MODELS.values():
            print(model.name, *(f"{name}={value}" for name, value in model.options.items()))
        return
    if arguments.name is None or arguments.output is None:
        parser.error("a NAME and -o FILE are needed")
    model = MODELS[arguments.name]
    try:
        data = encoded(model, dict(_option(model, word) for word in rest), arguments.output.suffix)
    except ValueError as error:
        parser.error(str(error))
    arguments.output.write_bytes(data)


def encoded(model: Model, options: dict[str, Any], suffix: str) -> bytes:
    """The model's bytes in the form of a suffix, `.jax_export` or `.mlir`."""
    if suffix not in (".jax_export", ".mlir"):
        raise ValueError(f"the suffix {suffix!r} is neither .jax_export nor .mlir")
    built = model.build(**options)
    if isinstance(built, str):
        if suffix != ".mlir":
            raise ValueError(f"{model.name} is MLIR text: use -o NAME.mlir")
        return built.encode()
    return built.mlir_module().encode() if suffix == ".mlir" else bytes(built.serialize())


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
            raise ValueError(f"--{name} takes true or false, not {text!r}")
        return name, text == "true"
    if isinstance(default, tuple):
        return name, tuple(text.split(","))
    try:
        return name, type(default)(text)
    except ValueError:
        raise ValueError(f"--{name} takes {type(default).__name__}, not {text!r}") from None


if __name__ == "__main__":
    main()
