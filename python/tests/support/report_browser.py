"""The page of `report` in a real browser, Debian's Chromium, driven by Playwright: the fixtures."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import report_documents
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from stablehlo_tools.report.document import Document
from stablehlo_tools.report.html import render_page

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
PATIENCE = 600_000.0  # milliseconds, for what only a hang reaches
SPACE = "\u202f"  # between a figure and its unit


def found_browser() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = found_browser()
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is in PATH, and CHROMIUM names no browser")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=path, headless=True, args=list(OPTIONS), timeout=PATIENCE
        )
        yield started
        started.close()


@dataclass
class Opened:
    """A page, and what went wrong on it."""

    page: Page
    trouble: list[str]

    def timeline(self, index: int = 0) -> Locator:
        return self.page.locator("canvas").nth(index)

    def data(self, index: int = 0) -> dict[str, Any]:
        data: dict[str, str] = self.timeline(index).evaluate("canvas => ({...canvas.dataset})")
        return {name: json.loads(value) for name, value in data.items()}

    def shown(self, index: int = 0) -> tuple[float, float]:
        data = self.data(index)
        return data["begin"], data["end"]

    def place(self, stream: int, ns: float, index: int = 0) -> tuple[float, float]:
        """Where a time lies on a lane, in pixels of the canvas; the memory curve is the last."""
        data = self.data(index)
        top, height = data["lanes"][stream]
        share = (ns - data["begin"]) / (data["end"] - data["begin"])
        return data["left"] + share * data["plot"], top + height / 2

    def point(self, stream: int, ns: float, index: int = 0) -> tuple[float, float]:
        """The same in pixels of the window, the timeline scrolled into sight."""
        self.timeline(index).scroll_into_view_if_needed()
        x, y = self.place(stream, ns, index)
        box = self.timeline(index).bounding_box()
        assert box is not None
        return box["x"] + x, box["y"] + y

    def hover(self, stream: int, ns: float, index: int = 0) -> str:
        self.page.mouse.move(*self.point(stream, ns, index))
        tooltip = self.page.locator("#tooltip")
        return tooltip.inner_text().replace(SPACE, " ") if tooltip.is_visible() else ""

    def click(self, stream: int, ns: float, index: int = 0) -> None:
        self.page.mouse.click(*self.point(stream, ns, index))
        self.settle()

    def settle(self) -> None:
        """Waits until what was asked for has been drawn."""
        frames = (
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        self.page.evaluate(frames)

    def until(self, condition: str) -> None:
        """Waits for a condition; the page forbids `wait_for_function`, which needs eval."""
        self.page.evaluate(
            f"""() => new Promise(done => {{
                const look = () => (({condition}) ? done() : requestAnimationFrame(look));
                look();
            }})"""
        )

    def press(self, *keys: str, index: int = 0) -> None:
        self.timeline(index).focus()
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def colour(self, stream: int, ns: float, index: int = 0) -> str:
        """The colour of the canvas, as #rrggbb, low in the lane, where no text stands."""
        x, _ = self.place(stream, ns, index)
        top, height = self.data(index)["lanes"][stream]
        script = """(canvas, [x, y]) => {
            const copy = document.createElement("canvas");
            const context = copy.getContext("2d", {willReadFrequently: true});
            const ratio = canvas.width / canvas.getBoundingClientRect().width;
            context.drawImage(canvas, -Math.floor(x * ratio), -Math.floor(y * ratio));
            const pixel = context.getImageData(0, 0, 1, 1).data;
            return "#" + [...pixel.slice(0, 3)].map(c => c.toString(16).padStart(2, "0")).join("");
        }"""
        return self.timeline(index).evaluate(script, [x, top + height - 3])

    def style(self, name: str) -> str:
        script = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
        return self.page.evaluate(script, f"--{name}")

    def column(self, title: str, table: int = 0) -> list[str]:
        box = self.page.locator("#collectives table").nth(table)
        titles = [text.strip() for text in box.locator("th").all_inner_texts()]
        cells = box.locator(f"tbody td:nth-child({titles.index(title) + 1})").all_inner_texts()
        return [cell.replace(SPACE, " ").split("\n")[0] for cell in cells]

    def head(self, title: str, table: int = 0) -> Locator:
        heads = self.page.locator("#collectives table").nth(table).locator("th")
        return heads.filter(has_text=re.compile(f"^{title}$"))


Open = Callable[..., Opened]


def watched(page: Page) -> Opened:
    opened = Opened(page, [])
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: opened.trouble.append(message.text))
    page.on("pageerror", lambda error: opened.trouble.append(str(error)))
    page.on("request", lambda request: opened.trouble.append(f"asked for {request.url}"))
    return opened


@pytest.fixture(scope="session")
def usual(browser: Browser) -> Iterator[Opened]:
    """The page that most tests load their document into: starting one for each takes long."""
    opened = watched(browser.new_page(viewport={"width": 1280, "height": 900}))
    yield opened
    opened.page.close()


@pytest.fixture
def opened(browser: Browser, usual: Opened, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of a document; nothing may go wrong on it and nothing may be fetched."""
    pages: list[Opened] = []

    def open_page(document: Document, **options: Any) -> Opened:
        path = tmp_path / f"{len(pages)}.html"
        path.write_text(render_page(document), encoding="utf-8")
        opened = watched(browser.new_page(**options)) if options else usual
        opened.trouble.clear()
        opened.page.goto(path.as_uri())
        opened.trouble.remove(f"asked for {path.as_uri()}")
        pages.append(opened)
        return opened

    yield open_page
    for each in pages:
        assert each.trouble == []
        if each is not usual:
            each.page.close()


EVERY_DOCUMENT = (
    report_documents.tiny,
    report_documents.one_program,
    report_documents.before_after,
    report_documents.many_events,
    report_documents.many_collectives,
    report_documents.hostile_names,
    report_documents.empty,
    report_documents.no_collectives,
    report_documents.unknown_trips,
)
