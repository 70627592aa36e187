"""The site, as it is built, in a browser: from files, without a server and without a network."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[3]
PHONE, DESKTOP = (390, 844), (1440, 900)
# One each with cards, consoles, figures, names; and with tables that are wider than a phone.
PAGES = (
    "index",
    "how/hang",
    "concepts/schedules",
    "reference/api",
    "reference/passes/pipeline-collectives",
)
GRAVE = ("serious", "critical")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a link that leads nowhere, or a page in no section, fails here. `make test`
    has built it just before, and says where."""
    if built_before := os.environ.get("STABLEHLO_TOOLS_SITE"):
        return Path(built_before)
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


# Each size and each scheme once; the other two pairs are soaked.
WINDOWS = (
    pytest.param((PHONE, "light"), id="phone-light"),
    pytest.param((DESKTOP, "dark"), id="desktop-dark"),
    pytest.param((PHONE, "dark"), id="phone-dark", marks=pytest.mark.soak),
    pytest.param((DESKTOP, "light"), id="desktop-light", marks=pytest.mark.soak),
)


@pytest.fixture(params=WINDOWS)
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A window; what a page asks for outside of its files fails the test."""
    (width, height), scheme = request.param
    opened = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        is_mobile=width == PHONE[0],
        reduced_motion="reduce",
    )
    asked: list[str] = []
    opened.on("request", lambda each: asked.append(each.url))
    yield opened
    opened.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def open_page(page: Page, site: Path, name: str) -> None:
    page.goto((site / f"{name}.html").as_uri())
    page.wait_for_selector("html.js")


@pytest.mark.parametrize("name", PAGES)
def test_nothing_grave_for_those_who_read_otherwise(page: Page, site: Path, name: str) -> None:
    open_page(page, site, name)
    assert _grave(page) == []


def _grave(page: Page) -> list[tuple[str, list[str], str]]:
    return [
        (each["id"], [node["html"][:200] for node in each["nodes"][:5]], _why(each))
        for each in Axe().run(page).response["violations"]
        if each["impact"] in GRAVE
    ]


def _why(violation: dict[str, Any]) -> str:
    return violation["nodes"][0].get("failureSummary", "")


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_window(page: Page, site: Path, name: str) -> None:
    open_page(page, site, name)
    assert _too_wide(page) == []


@pytest.mark.soak
def test_every_page_is_as_good(page: Page, site: Path) -> None:
    wrong: dict[str, object] = {}
    for file in sorted(site.rglob("*.html")):
        name = str(file.relative_to(site).with_suffix(""))
        if name == "404":
            continue
        open_page(page, site, name)
        found = [*_grave(page), *_too_wide(page)]
        if found:
            wrong[name] = found
    assert wrong == {}


def _too_wide(page: Page) -> list[str]:
    """What goes beyond the window."""
    return page.evaluate(
        """() => document.documentElement.scrollWidth > innerWidth + 1
            ? [...document.querySelectorAll("article *")]
                .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
                .slice(0, 5).map(e => e.outerHTML.slice(0, 120))
            : []"""
    )


def test_headings_go_down_by_one_and_pictures_have_words(site: Path) -> None:
    wrong: list[str] = []
    for file in sorted(site.rglob("*.html")):
        if file.name == "404.html":
            continue
        text = file.read_text(encoding="utf-8")
        article = text[text.index("<article") : text.index("</article>")]
        wrong += [f"{file.name}: {each}" for each in _heading_faults(article)]
        wrong += [f"{file.name}: {each}" for each in _pictures_without_words(article)]
    assert wrong == []


def test_search_answers_from_files(browser: Browser, site: Path) -> None:
    page = browser.new_page(viewport={"width": DESKTOP[0], "height": DESKTOP[1]})
    open_page(page, site, "how/hang")
    page.click("input.md-search__input")
    page.locator("input.md-search__input").press_sequentially("rematerialize")  # it listens to keys
    page.wait_for_selector(".md-search-result__item a", timeout=60_000)
    links = page.eval_on_selector_all(
        ".md-search-result__item a", "links => links.map(e => e.getAttribute('href'))"
    )
    assert any("rematerialize.html" in link for link in links)
    page.close()


def _heading_faults(article: str) -> Iterator[str]:
    levels = [int(each) for each in re.findall(r"<h([1-6])\b", article)]
    if levels[:1] != [1]:
        yield "does not begin with a heading of the first level"
    for before, after in itertools.pairwise(levels):
        if after > before + 1:
            yield f"a heading of level {after} below one of level {before}"


def _pictures_without_words(article: str) -> Iterator[str]:
    for picture in re.findall(r"<img\b[^>]*>", article):
        words = re.search(r'alt="([^"]*)"', picture)
        if words is None or len(words[1].split()) < 3:
            yield picture
