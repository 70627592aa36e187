"""What mkdocs does to the pages: marks of snippets stay in the source, other files become pages.

The pages are read on the site as they are in the repository, where a comment in front of a block
says how it is tested (snippets.py), and a link to a notebook leads to the notebook itself.
Notebooks, CHANGELOG.md and CONTRIBUTING.md are pages of the site only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `docs`

from docs import notebook_pages

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_ROOT = Path(__file__).parents[2]
_OF_THE_ROOT = {
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
}
_NOTEBOOK = re.compile(r"(\]\([\w./-]*notebooks/[\w-]+)\.ipynb\)")
_MARK = re.compile(r"^<!-- snippet: .*?-->\n?", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files with a page for each notebook, and for those of the root."""
    from mkdocs.structure.files import File

    of_the_root = {
        page: (_ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](../")
        for name, page in _OF_THE_ROOT.items()
    }
    for path, text in {**notebook_pages.pages(), **of_the_root}.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """The text of a page without the marks, links to notebooks leading to their pages."""
    return _NOTEBOOK.sub(r"\1.md)", _MARK.sub("", markdown))


def on_post_page(output: str, **_: object) -> str:
    """A page whose search, a dialog, has a name, which the theme leaves out."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
