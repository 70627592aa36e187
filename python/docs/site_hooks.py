"""What mkdocs does to the pages: marks of snippets stay in the source.

The pages are read on the site as they are in the repository, where a comment in front of a block
says how it is tested (snippets.py).
"""

from __future__ import annotations

import re

_MARK = re.compile(r"^<!-- snippet: .*?-->\n?", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """The text of a page without the marks."""
    return _MARK.sub("", markdown)


def on_post_page(output: str, **_: object) -> str:
    """A page whose search, a dialog, has a name, which the theme leaves out."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
