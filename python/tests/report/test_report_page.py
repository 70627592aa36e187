"""The page of `report`: it opens, what its head says, its colours, paper and narrow windows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources

import pytest
import report_documents
from playwright.sync_api import Browser, Page
from report_browser import EVERY_DOCUMENT, SPACE, Open

from stablehlo_tools.report.document import Document
from stablehlo_tools.report.html import CHARTS, SCRIPTS, render_page


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
    assert names == {"theme.js", *SCRIPTS, *CHARTS}
    for name in names - {"uplot.js"}:  # a library, as published
        text = (folder / name).read_text("utf-8")
        assert text.startswith('"use strict";\n'), name
        assert "</script" not in text, name
        assert "innerHTML" not in text, name


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            report_documents.tiny,
            "2.00 us of 9.00 us is exposed communication; "
            "a lower bound for these tasks is 7.00 us (in the order of the program's text, before "
            "XLA reorders it).",
        ),
        (report_documents.empty, "This program does nothing that takes time."),
        (
            report_documents.no_collectives,
            "This program has no collectives: its 3.20 ms are compute.",
        ),
        (
            report_documents.before_after,
            "Exposed communication falls from 22.3 ms to 11.2 ms and the total falls from 82.0 ms "
            "to 65.9 ms; a lower bound for the tasks of after is 51.4 ms.",
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


def test_dark_where_the_system_is_dark_and_as_chosen(opened: Open) -> None:
    page = opened(report_documents.tiny(), color_scheme="dark")
    dark = page.style("page")
    assert page.page.locator("html").get_attribute("data-theme") == "dark"
    assert page.colour(0, 1000.0) == page.style("product")
    page.page.emulate_media(color_scheme="light")
    page.page.locator("html[data-theme=light]").wait_for()
    assert page.style("page") != dark
    assert page.colour(0, 1000.0) == page.style("product")
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
