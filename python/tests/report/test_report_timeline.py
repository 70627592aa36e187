"""The timelines of the page of `report`: what is drawn, pointed at and zoomed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import report_documents
from report_browser import SPACE, Open

from stablehlo_tools.report.document import Document
from stablehlo_tools.report.html import render_page


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
    assert "wait for all_reduce (grads)" in text
    assert "the compute stream stands still for 2.00 us" in text
    assert page.hover(1, 7000.0) == ""
    assert "3.00 GiB alive" in page.hover(-1, 4000.0)
    assert "2.00 GiB alive" in page.hover(-1, 7000.0)


def test_exposed_and_hidden_parts_have_their_colours(opened: Open) -> None:
    page = opened(report_documents.tiny())
    compute, hidden, exposed = (page.style(name) for name in ("product", "hidden", "exposed"))
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
    assert text.startswith("wait for all_reduce (grads)")
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
