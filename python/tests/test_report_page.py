"""The page of `report`, in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import report_documents
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from stablehlo_tools.report.document import Document
from stablehlo_tools.report.html import SCRIPTS, render_page

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
SPACE = "\u202f"  # between a figure and its unit


def found_browser() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = found_browser()
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is in PATH, and CHROMIUM names no browser")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=path, headless=True, args=list(OPTIONS)
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
    page.on("console", lambda message: opened.trouble.append(message.text))
    page.on("pageerror", lambda error: opened.trouble.append(str(error)))
    page.on("request", lambda request: opened.trouble.append(f"asked for {request.url}"))
    return opened


@pytest.fixture(scope="module")
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


@pytest.mark.parametrize("make", EVERY_DOCUMENT, ids=lambda make: make.__name__)
def test_page_opens_without_errors_or_requests(opened: Open, make: Callable[[], Document]) -> None:
    """The fixture looks for both; here, that the page has drawn itself to its end."""
    document = make()
    page = opened(document).page
    assert document.version in page.locator("#footer").inner_text()
    assert page.locator("canvas").count() == len(document.programs)
    assert page.locator(".card").count() == len(document.programs)


def test_page_names_nothing_outside_itself() -> None:
    text = render_page(report_documents.before_after())
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<link|src=", text)
    assert "default-src 'none'" in text


def test_scripts_are_strict_and_each_is_used() -> None:
    folder = resources.files("stablehlo_tools.report") / "page"
    names = {entry.name for entry in folder.iterdir() if entry.name.endswith(".js")}
    assert names == {"theme.js", *SCRIPTS}
    for name in names:
        text = (folder / name).read_text("utf-8")
        assert text.startswith('"use strict";\n'), name
        assert "</script" not in text, name
        assert "innerHTML" not in text, name


# --- the head ---


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            report_documents.tiny,
            "2.00 us of 9.00 us is exposed communication; "
            "no schedule of this program is faster than 7.00 us.",
        ),
        (report_documents.empty, "This program does nothing that takes time."),
        (
            report_documents.no_collectives,
            "This program has no collectives: its 3.20 ms are compute.",
        ),
        (
            report_documents.before_after,
            "Exposed communication falls from 22.3 ms to 11.2 ms and the total falls from 82.0 ms "
            "to 65.9 ms; no schedule of after is faster than 51.4 ms.",
        ),
    ],
    ids=["tiny", "empty", "no_collectives", "before_after"],
)
def test_first_sentence_says_what_communication_costs(
    opened: Open, make: Callable[[], Document], sentence: str
) -> None:
    page = opened(make()).page
    assert page.locator("#lead").inner_text().replace(SPACE, " ") == sentence


def test_hidden_communication_is_said_to_be_hidden(opened: Open) -> None:
    document = report_documents.tiny()
    program = replace(document.programs[0], exposed_ns=0.0)
    page = opened(replace(document, programs=(program,))).page
    assert page.locator("#lead").inner_text().startswith("All communication of these 9.00")


def test_any_number_of_programs(opened: Open) -> None:
    document = report_documents.before_after()
    three = replace(document, programs=(*document.programs, document.programs[0]))
    page = opened(three).page
    assert page.locator("#lead").inner_text().startswith("Of 3 programs, after (XLA:GPU) has the")
    assert page.locator("canvas").count() == 3
    page = opened(replace(document, programs=())).page
    assert page.locator("#lead").inner_text() == "There is no program here."


def test_cards_have_the_figures_and_the_second_its_differences(opened: Open) -> None:
    page = opened(report_documents.before_after()).page
    first, second = (
        text.replace(SPACE, " ").replace("\n", " ")
        for text in page.locator(".card").all_inner_texts()
    )
    for part in ("82.0 ms total", "22.3 ms 27.2 %", "56.1 ms compute stream", "46.1 % longer"):
        assert part in first
    assert "52.7 GiB 65.9 % of 80.0 GiB" in first
    assert "8 × H100 SXM, 64 devices" in first
    assert "\u2212" not in first
    assert "\u221216.1 ms (\u221219.7 %)" in second
    assert "\u221211.1 ms (\u221249.7 %)" in second
    assert "unchanged" in second


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("time(0)", "0 ns"),
        ("time(12)", "12 ns"),
        ("time(999.6)", "1.00 us"),
        ("time(12345)", "12.3 us"),
        ("time(1e9)", "1.00 s"),
        ("time(-3.1e6)", "\u22123.10 ms"),
        ("time(null)", "unknown"),
        ("bytes(64)", "64 B"),
        ("bytes(999.6)", "0.976 KiB"),
        ("bytes(1024)", "1.00 KiB"),
        ("bytes(218 * 1024 ** 2)", "218 MiB"),
        ("bytes(80 * 1024 ** 3)", "80.0 GiB"),
        ("moment(310000)", "310 us"),
        ("moment(3666000)", "3.666 ms"),
        ("percent(1, 3)", "33.3 %"),
        ("percent(1, 1e9)", "< 0.1 %"),
        ("percent(1, 0)", "0 %"),
        ("axisText(12.5e6, 0.5e6, 2e7)", "12.5 ms"),
        ("plural(1, 'run')", "1 run"),
        ("plural(1234, 'run')", "1,234 runs"),
    ],
)
def test_units(units: Page, call: str, text: str) -> None:
    assert units.evaluate(call).replace(SPACE, " ") == text


@pytest.fixture(scope="module")
def units(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.set_content(render_page(report_documents.tiny()))
    yield page
    page.close()


# --- timelines ---


def test_tooltip_of_a_collective(opened: Open) -> None:
    text = opened(report_documents.tiny()).hover(1, 3000.0)
    assert text.splitlines()[0] == "grads"
    for part in (
        "2 us – 5 us, takes 3.00 us",
        "2.00 us, 66.7 % of this run",
        "4.00 MiB bf16",
        "[[0..7]]",
        "data",
        "second 1.00 us",
        "llama.py:88 in block",
    ):
        assert part in text


def test_tooltip_of_compute_and_of_a_wait(opened: Open) -> None:
    page = opened(report_documents.tiny())
    assert page.hover(0, 1000.0).splitlines()[0] == "first"
    assert page.hover(0, 2500.0).splitlines()[0] == "second"
    text = page.hover(0, 4000.0)
    assert "wait for grads" in text
    assert "the compute stream stands still for 2.00 us" in text
    assert page.hover(1, 7000.0) == ""
    assert "3.00 GiB alive" in page.hover(-1, 4000.0)
    assert "2.00 GiB alive" in page.hover(-1, 7000.0)


def test_exposed_and_hidden_parts_have_their_colours(opened: Open) -> None:
    page = opened(report_documents.tiny())
    compute, hidden, exposed = (page.style(name) for name in ("compute", "hidden", "exposed"))
    assert page.colour(0, 1000.0) == compute
    assert page.colour(0, 4000.0) == exposed
    assert page.colour(1, 2500.0) == hidden
    assert page.colour(1, 4000.0) == exposed
    assert page.colour(1, 1000.0) == page.style("lane")


def test_a_stall_for_another_collective_does_not_expose_this_one(opened: Open) -> None:
    clock = report_documents.Clock()
    slow = clock.collective("all_gather", "slow", "IB", 1.0)
    quick = clock.collective("all_reduce", "quick", "NVLink", 1.0)
    clock.send(slow, 8000.0)
    clock.send(quick, 2000.0)
    clock.wait(quick)
    clock.compute("work", 10000.0)
    clock.wait(slow)
    page = opened(Document("two", "0.1.0", (clock.program("step"),)))
    assert page.colour(1, 1000.0) == page.style("hidden")
    assert page.colour(2, 1000.0) == page.style("exposed")
    assert "0 ns, 0 % of this run" in page.hover(1, 1000.0)


def test_communication_after_the_end_of_compute_is_exposed(opened: Open) -> None:
    """Nothing waits for it but the end of the program."""
    clock = report_documents.Clock()
    number = clock.collective("all_reduce", "last", "NVLink", 1.0)
    clock.send(number, 1000.0)
    clock.wait(number)
    clock.compute("work", 1000.0)
    clock.send(number, 3000.0)
    clock.compute("more", 1000.0)
    program = replace(clock.program("step"), total_ns=5000.0)
    page = opened(Document("tail", "0.1.0", (program,)))
    assert page.colour(1, 2500.0) == page.style("hidden")
    assert page.colour(1, 4000.0) == page.style("exposed")
    assert "2.00 us, 66.7 % of this run" in page.hover(1, 4000.0)


def test_folded_iterations_are_hatched_on_every_lane(opened: Open) -> None:
    """The block may stand on the compute stream alone; the others are not idle meanwhile."""
    document = report_documents.before_after()
    program = document.programs[0]
    events = tuple(e for e in program.events if not (e.folded and e.stream))
    page = opened(replace(document, programs=(replace(program, events=events),)))
    colours = {page.colour(2, ns) for ns in range(30_000_000, 32_000_000, 200_000)}
    assert len(colours) > 1
    assert page.style("lane") not in colours
    assert "29 more iterations" in page.hover(0, 40e6)


def test_memory_is_drawn_to_the_end_of_its_program(opened: Open) -> None:
    page = opened(report_documents.before_after())
    colour = page.style("memory")
    assert page.colour(-1, 70e6, index=0) == colour
    assert page.colour(-1, 60e6, index=1) == colour
    assert page.colour(-1, 72e6, index=1) != colour


def test_waits_are_named_and_places_are_short(opened: Open) -> None:
    place = "/home/someone/src/models/llama.py:88:4 in block (all_reduce)"
    document = report_documents.tiny()
    program = document.programs[0]
    events = tuple(replace(e, label="wait_tensor", place=place) for e in program.events)
    rows = tuple(replace(row, place=place) for row in program.collectives)
    changed = replace(program, events=events, collectives=rows)
    page = opened(replace(document, programs=(changed,)))
    text = page.hover(0, 4000.0)
    assert text.startswith("wait for grads")
    assert "llama.py:88:4 in block" in text
    assert "/home" not in text
    assert page.column("Source") == ["llama.py:88:4 in block"]
    page.click(0, 4000.0)
    assert place in page.page.locator("#details").inner_text()


def test_click_pins_details_and_marks_the_row(opened: Open) -> None:
    page = opened(report_documents.before_after())
    page.press("+", "+", "+", "Home")
    page.click(1, 500e3, index=1)
    details = page.page.locator("#details")
    assert details.locator("h3").inner_text() == "all_gather.17"
    assert "33 runs" in details.inner_text()
    marked = page.page.locator("tr.marked")
    assert marked.count() == 1
    assert "all_gather.17" in marked.inner_text()
    tables = page.page.locator("#collectives table")
    assert tables.nth(1).locator("tr.marked").count() == 1
    page.page.get_by_role("button", name="Show in the table").click()
    assert marked.locator("button").evaluate("b => b === document.activeElement")
    page.press("Escape")
    assert details.is_hidden()
    assert marked.count() == 0


def test_click_on_a_row_frames_its_events(opened: Open) -> None:
    page = opened(report_documents.tiny())
    before = page.data()["drawn"]
    page.page.locator("#collectives tbody button").first.click()
    page.settle()
    assert page.data()["drawn"] == before + 2  # the collective and its wait
    assert page.page.locator("#details h3").inner_text() == "all_reduce grads"


def test_keys_zoom_and_pan_all_programs_together(opened: Open) -> None:
    page = opened(report_documents.before_after())
    whole = page.shown()
    assert whole == (0, report_documents.before_after().programs[0].total_ns)
    page.press("+")
    begin, end = page.shown()
    assert end - begin == pytest.approx(whole[1] / 2)
    assert page.shown(1) == (begin, end)
    page.press("ArrowRight", index=1)
    assert page.shown()[0] == pytest.approx(begin + 0.2 * (end - begin))
    assert page.shown(1) == page.shown()
    page.press("ArrowLeft", "-")
    assert page.shown() == pytest.approx(whole)
    page.press("+", "+", "End")
    assert page.shown()[1] == whole[1]
    page.press("0")
    assert page.shown() == whole == page.shown(1)


def test_zoom_has_ends(opened: Open) -> None:
    page = opened(report_documents.tiny())
    page.press(*["+"] * 60)
    begin, end = page.shown()
    assert 0 < end - begin < 1
    page.press(*["-"] * 60)
    assert page.shown() == (0, 9000)


def test_wheel_zooms_around_the_pointer_and_drag_pans(opened: Open) -> None:
    page = opened(report_documents.before_after())
    page.page.mouse.move(*page.point(0, 20e6))
    page.page.wait_for_timeout(300)  # what was scrolled into sight is no longer scrolling
    place = page.place(0, 20e6)
    page.page.mouse.wheel(0, -300)
    page.settle()
    begin, end = page.shown()
    assert end - begin < 60e6
    assert page.place(0, 20e6)[0] == pytest.approx(place[0], abs=1.5)
    assert page.shown(1) == (begin, end)
    x, y = page.point(0, 20e6)
    page.page.mouse.down()
    page.page.mouse.move(x - 100, y, steps=4)
    page.page.mouse.up()
    page.settle()
    assert page.place(0, 20e6)[0] == pytest.approx(place[0] - 100, abs=1.5)
    assert page.shown(1) == page.shown() != (begin, end)
    assert page.page.locator("#details").is_hidden()  # a drag is not a click


def test_wheel_scrolls_the_page_where_all_is_shown(opened: Open) -> None:
    page = opened(report_documents.before_after())
    page.page.mouse.move(*page.point(0, 20e6))
    page.page.wait_for_timeout(300)
    page.page.mouse.wheel(0, 200)
    page.until("window.scrollY > 0")
    assert page.shown()[0] == 0


def test_pinch_zooms(opened: Open) -> None:
    page = opened(report_documents.tiny(), has_touch=True)
    (x0, y), (x1, _) = page.point(0, 3000.0), page.point(0, 6000.0)
    session = page.page.context.new_cdp_session(page.page)

    def touch(kind: str, *xs: float) -> None:
        points = [{"x": x, "y": y, "id": number} for number, x in enumerate(xs)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", x0, x1)
    for step in range(1, 6):
        touch("touchMove", x0 - 20 * step, x1 + 20 * step)
    touch("touchEnd")
    page.settle()
    begin, end = page.shown()
    width = x1 - x0
    assert end - begin == pytest.approx(9000 * width / (width + 200), rel=0.1)
    assert begin < 3000 < 6000 < end


def test_buttons_zoom_and_say_what_is_shown(opened: Open) -> None:
    page = opened(report_documents.before_after()).page
    readout = page.locator("#range")
    assert readout.inner_text().replace(SPACE, " ") == "all 82.0 ms"
    assert page.locator("#all").is_disabled()
    page.get_by_role("button", name="Zoom in").click()
    page.locator("#all:enabled").wait_for()
    assert "of 82.0" in readout.inner_text()
    page.get_by_role("button", name="Fit").click()
    page.locator("#all:disabled").wait_for()


def test_keys_go_from_wait_to_wait(opened: Open) -> None:
    page = opened(report_documents.before_after())
    title = page.page.locator("#details h3")
    page.press("n")
    assert title.inner_text() == "wait for all_gather.17"
    assert page.shown()[1] < 10e6
    page.press("n")
    assert title.inner_text() == "wait for all_reduce.23"
    page.press("p")
    assert title.inner_text() == "wait for all_gather.17"
    page.press("p")  # round the beginning to the last one
    assert title.inner_text() == "wait for all_reduce.55"
    assert page.shown()[0] > 60e6


def test_critical_path_fades_the_rest(opened: Open) -> None:
    page = opened(report_documents.before_after())
    page.press("+", "+", "+", "Home")
    compute, gather = page.colour(0, 900e3), page.colour(1, 500e3)
    page.page.locator("#critical").click()
    page.settle()
    assert page.page.locator("#critical").get_attribute("aria-pressed") == "true"
    assert page.colour(0, 900e3) == compute
    assert page.colour(1, 500e3) != gather


@pytest.mark.parametrize("count", [10_000, 30_000])
def test_many_events_are_drawn_by_pixels(opened: Open, count: int) -> None:
    """Columns of three pixels, of two colours where both are there, on four lanes; the memory."""
    document = report_documents.many_events(count)
    assert sum(len(program.events) for program in document.programs) >= count
    assert len(render_page(document)) < 100_000 + 20 * count
    page = opened(document)
    for index in (0, 1):
        assert page.data(index)["drawn"] < page.data(index)["plot"] * (4 * 2 / 3 + 2)
    page.press("+", "+", "+", "+", "+", "+", "+")
    begin, end = page.shown()
    inside = sum(begin < e.end and e.begin < end for e in document.programs[0].events)
    assert page.data()["drawn"] < 4 * inside + 100  # box, label, exposed part, step of the memory


def test_requests_for_a_drawing_are_answered_once_a_frame(opened: Open) -> None:
    page = opened(report_documents.many_events())
    page.settle()
    before = page.data()["frames"]
    page.timeline().evaluate(
        """async canvas => {
            for (let turn = 0; turn < 50; turn++) {
                canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
                canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
            }
            await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
        }"""
    )
    assert page.data()["frames"] == before + 1


def test_crowded_pixels_say_so(opened: Open) -> None:
    text = opened(report_documents.many_events()).hover(0, 300e6)
    assert re.search(r"\d+ tasks on one pixel", text)


# --- tables ---


def test_collectives_are_sorted_by_exposed_then_as_asked(opened: Open) -> None:
    page = opened(report_documents.before_after())
    names = ["all_gather", "all_reduce", "all_reduce", "all_reduce", "reduce_scatter"]
    assert page.head("Exposed").get_attribute("aria-sort") == "descending"
    assert page.column("Exposed") == ["16.6 ms", "2.82 ms", "2.82 ms", "28.0 us", "0 ns"]
    page.head("Exposed").locator("button").click()
    assert page.head("Exposed").get_attribute("aria-sort") == "ascending"
    assert page.column("Exposed") == ["0 ns", "28.0 us", "2.82 ms", "2.82 ms", "16.6 ms"]
    page.head("Bytes").locator("button").click()  # as numbers: 4 B is less than 32.0 MiB
    assert page.column("Bytes") == ["218 MiB", "218 MiB", "32.0 MiB", "32.0 MiB", "4 B"]
    page.head("Collective").locator("button").focus()
    page.page.keyboard.press("Enter")
    assert page.head("Collective").get_attribute("aria-sort") == "ascending"
    assert page.head("Bytes").get_attribute("aria-sort") == "none"
    assert page.column("Collective") == names
    page.page.keyboard.press("Space")
    assert page.column("Collective") == names[::-1]
    assert page.column("Exposed", table=1)[0] == "5.55 ms"  # the other table keeps its order


def test_filters(opened: Open) -> None:
    page = opened(report_documents.before_after())
    page.page.get_by_label("Filter by text").fill("llama.py MLP")
    assert page.column("Exposed") == ["2.82 ms"]
    assert page.column("Exposed", table=1) == ["2.82 ms"]
    page.page.get_by_label("Filter by text").fill("")
    page.page.get_by_label("Kind").select_option("all_reduce")
    assert page.column("Collective") == ["all_reduce"] * 3
    page.page.get_by_label("Kind").select_option("")
    page.page.get_by_label("exposed only").check()
    assert len(page.column("Collective")) == 4
    page.page.get_by_label("Filter by text").fill("no such thing")
    assert page.column("Collective") == ["No row matches the filter."]


def test_long_table_shows_its_first_rows_until_asked(opened: Open) -> None:
    page = opened(report_documents.many_collectives(150))
    assert len(page.column("Exposed")) == 100
    assert page.column("Exposed")[0] == "150 us"
    page.page.get_by_role("button", name="Show the other 50 of 150 rows").click()
    assert len(page.column("Exposed")) == 150
    assert page.page.locator(".more:visible").count() == 0


def test_clicked_task_is_marked_beyond_the_first_rows(opened: Open) -> None:
    page = opened(report_documents.many_collectives(150))
    page.press("n")  # the shortest: the last row
    assert "all_gather.0" in page.page.locator("tr.marked").inner_text()


def test_other_tables_and_notes(opened: Open) -> None:
    page = opened(report_documents.before_after()).page
    alive = page.locator("#alive table").first.inner_text().replace(SPACE, " ")
    assert "before: 52.7 GiB at 79.254 ms" in alive
    assert "adamw first moments" in alive
    assert "78.9 ms" in page.locator("#loops table").first.inner_text().replace(SPACE, " ")
    assert page.locator("#notes li").count() == 4


def test_unknown_trips_are_said_to_be_unknown(opened: Open) -> None:
    page = opened(report_documents.unknown_trips()).page
    assert "unknown, 1 timed" in page.locator("#loops").inner_text()
    assert "how often the loop runs is not known" in page.locator("#notes").inner_text()


def test_names_are_text_wherever_they_stand(opened: Open) -> None:
    document = report_documents.hostile_names()
    page = opened(document)
    broken = "window.broken"
    program = document.programs[0]
    assert page.page.evaluate(broken) is None
    assert page.page.locator("#title").inner_text() == document.title
    assert page.page.locator(".card .name").inner_text() == program.name
    for event in (event for event in program.events if event.kind == "collective"):
        page.hover(event.stream, (event.begin + event.end) / 2)
        page.click(event.stream, (event.begin + event.end) / 2)
    assert page.page.locator("img, script[src]").count() == 0
    assert page.page.evaluate(broken) is None


def test_half_a_surrogate_pair_can_be_written() -> None:
    document = replace(report_documents.hostile_names(), title="\ud800 {{data}}")
    assert b"<title>? {{data}}</title>" in render_page(document).encode("utf-8")


def test_numbers_that_json_has_not() -> None:
    document = report_documents.tiny()
    program = replace(document.programs[0], capacity_bytes=math.inf, floor_ns=math.nan)
    text = render_page(replace(document, programs=(program,)))
    assert '"capacity_bytes":null' in text
    assert '"floor_ns":null' in text


# --- colours, paper, narrow windows ---


def test_dark_where_the_system_is_dark_and_as_chosen(opened: Open) -> None:
    page = opened(report_documents.tiny(), color_scheme="dark")
    dark = page.style("page")
    assert page.page.locator("html").get_attribute("data-theme") == "dark"
    assert page.colour(0, 1000.0) == page.style("compute")
    page.page.emulate_media(color_scheme="light")
    page.page.locator("html[data-theme=light]").wait_for()
    assert page.style("page") != dark
    assert page.colour(0, 1000.0) == page.style("compute")
    button = page.page.locator("#theme")
    assert button.inner_text() == "Theme: auto"
    button.click()
    button.click()
    assert button.inner_text() == "Theme: dark"
    assert page.style("page") == dark
    page.page.reload()
    assert page.style("page") == dark
    page.trouble.clear()  # the reload is a request


def test_prints_light_with_all_tables(opened: Open) -> None:
    page = opened(report_documents.before_after(), color_scheme="dark")
    page.page.evaluate(
        """() => window.addEventListener("beforeprint", () => {
            const canvas = document.querySelector("canvas");
            window.printed = {theme: document.documentElement.dataset.theme, width: canvas.width};
        })"""
    )
    assert page.page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    printed = page.page.evaluate("window.printed")
    assert printed["theme"] == "light"
    assert page.page.locator("html").get_attribute("data-theme") == "dark"
    assert page.data()["plot"] < printed["width"]
    page.page.emulate_media(media="print")
    assert page.page.locator("#alive table").first.is_visible()
    assert page.page.locator(".tools:visible, .hint:visible, #theme:visible").count() == 0
    for box in page.page.locator(".scroll").all():
        assert box.evaluate("box => getComputedStyle(box).overflow") == "visible"
    cut = ".long, .sub"
    widths = page.page.locator(cut).evaluate_all(
        "all => all.map(e => e.scrollHeight - e.clientHeight)"
    )
    assert max(widths) <= 1


@pytest.mark.parametrize(
    "make",
    [report_documents.before_after, report_documents.hostile_names],
    ids=lambda make: make.__name__,
)
def test_nothing_sticks_out_of_the_window(opened: Open, make: Callable[[], Document]) -> None:
    page = opened(make(), viewport={"width": 1800, "height": 800})
    for width in (1800, 1000, 700):
        page.page.set_viewport_size({"width": width, "height": 800})
        page.until(f"document.querySelector('canvas').width < {width}")
        assert page.page.evaluate("document.documentElement.scrollWidth") <= width
        shown = page.timeline().evaluate("c => c.getBoundingClientRect().width - c.width")
        assert abs(shown) < 1  # drawn at the size that it is shown in


def test_without_scripts_the_page_says_what_is_missing(opened: Open) -> None:
    page = opened(report_documents.tiny(), java_script_enabled=False).page
    assert "inspect" in page.locator(".noscript").inner_text()


def test_text_is_told_from_its_ground() -> None:
    """A contrast of 4.5 at least, WCAG 2.2 section 1.4.3, in both themes."""
    css = (resources.files("stablehlo_tools.report") / "page" / "page.css").read_text("utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root[^{]*\{([^}]*)\}", css)
    )
    pairs = [
        (text, ground)
        for ground in ("page", "surface", "lane", "marked")
        for text in ("text", "muted", "accent", "better", "worse")
    ]
    pairs += [(f"{kind}-text", kind) for kind in ("compute", "hidden", "exposed", "loop")]
    pairs += [("limit", "surface"), ("text", "memory"), ("limit", "memory")]
    for theme in (light, {**light, **dark}):
        low = [pair for pair in pairs if contrast(theme[pair[0]], theme[pair[1]]) < 4.5]
        assert low == []


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
