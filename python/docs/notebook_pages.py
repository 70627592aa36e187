"""The notebooks of docs/notebooks as pages of the site: their text, their code and what it printed.

What is stored in a notebook is what a test sees it print again (test_notebooks.py), so a page needs
no run of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


def pages() -> dict[str, str]:
    """The Markdown of each notebook, by its path below docs."""
    return {f"notebooks/{path.stem}.md": page(path) for path in sorted(FOLDER.glob("*.ipynb"))}


def page(path: Path) -> str:
    """The Markdown of one notebook; ValueError for an output that is no text."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(_fenced("python", source))
        parts += [_fenced("text", text) for text in map(_printed, cell["outputs"]) if text]
    where = f"A notebook, to run as [{path.name}]({path.name})."
    first, *rest = parts
    heading, _, introduction = first.partition("\n")
    return "\n\n".join([heading, where, introduction.strip(), *rest]) + "\n"


def _printed(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return "".join(output["text"]).rstrip()
    text = output.get("data", {}).get("text/plain")
    if text is None:
        raise ValueError(f"an output of {output['output_type']} has no text")
    return "".join(text).rstrip()


def _fenced(language: str, text: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text}\n{fence}"
