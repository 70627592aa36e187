"""The tables of the page of `report`, and what stands in them."""

from __future__ import annotations

import math
from dataclasses import replace

import report_documents
from report_browser import SPACE, Open

from stablehlo_tools.report.html import render_page


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
