"""Draw the explanatory figures of the docs: `python python/docs/drawings.py` writes them all.

Each is an SVG on a light card of its own, so that it reads the same on light and dark pages. Its
letters are large for its width: a phone shows the card at two thirds of its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
WIDTH = 560
INK, MUTED, EDGE = "#1b1f24", "#57606a", "#8a94a0"
EXPOSED, TOKEN, GOOD, BLUE = "#b93c05", "#5d4e9c", "#0b6b53", "#0b5cad"
# Fill, border and letters of a box, and dashes of its border: the colours of the tool's own pages.
BOXES = {
    "card": ("#fbfcfd", "#d5dae1", INK, "none"),
    "compute": ("#9db3d4", "#6d87b0", "#1f2731", "none"),
    "hidden": ("#b5dbf3", "#6aa9d2", "#0d3550", "none"),
    "exposed": (EXPOSED, "#8f3207", "#ffffff", "none"),
    "unreached": ("#ffffff", EDGE, MUTED, "6 4"),
    "lane": ("#eef1f5", "none", INK, "none"),
    "plain": ("#eef1f5", EDGE, INK, "none"),
    "white": ("#ffffff", EDGE, INK, "none"),
    "good": ("#e3f2ec", GOOD, INK, "none"),
    "token": ("#e3dff2", TOKEN, INK, "none"),
    "row": ("none", BLUE, INK, "none"),
    "column": ("none", EXPOSED, INK, "6 4"),
}
MONOSPACE = ' font-family="monospace"'
Point = tuple[float, float]


def text(x: float, y: float, words: str, fill: str = INK, at: str = "start", more: str = "") -> str:
    """Words on the base line `y`: `x` is their start, middle or end; `more` are attributes."""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{at}"'
    return f'<text {place} fill="{fill}"{more}>{escape(words)}</text>'


def bold(x: float, y: float, words: str) -> str:
    """Words of a heading or a name."""
    return text(x, y, words, more=' font-weight="bold"')


def box(x: float, y: float, w: float, h: float, kind: str, *words: str) -> str:
    """A box with words in its middle: a name, code in backquotes, or code and small words."""
    fill, border, ink, dashes = BOXES[kind]
    shape = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" stroke-width="1.5"'
    drawn = f'<rect {shape} fill="{fill}" stroke="{border}" stroke-dasharray="{dashes}"/>'
    for number, each in enumerate(words):
        more = MONOSPACE if each.startswith("`") else ' font-size="14"' if number else ""
        low = y + h / 2 + 5.5 + 19 * (number - (len(words) - 1) / 2)
        drawn += text(x + w / 2, low, each.strip("`"), ink, "middle", more)
    return drawn


def line(*points: Point, colour: str = MUTED, dashes: str = "none") -> str:
    """A line through the points."""
    steps = " L".join(f"{x:g} {y:g}" for x, y in points)
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
    return f'<path d="M{steps}" {style}/>'


def arrow(*points: Point, colour: str = MUTED, both: bool = False) -> str:
    """A line through the points with a tip at its end, or at both ends."""
    drawn = line(*points, colour=colour)
    for (x0, y0), (x, y) in [points[-2:], points[1::-1]][: 1 + both]:
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = 10 * (x - x0) / length, 10 * (y - y0) / length
        sides = f"L{x - dx - dy / 2:.1f} {y - dy + dx / 2:.1f} L{x - dx + dy / 2:.1f}"
        drawn += f'<path d="M{x:g} {y:g} {sides} {y - dy - dx / 2:.1f} Z" fill="{colour}"/>'
    return drawn


def span(x0: float, x1: float, y: float, words: str, colour: str = INK) -> str:
    """A length with its name below it."""
    ends = "".join(line((x, y - 6), (x, y + 6), colour=colour) for x in (x0, x1))
    name = text((x0 + x1) / 2, y + 20, words, colour, "middle")
    return line((x0, y), (x1, y), colour=colour) + ends + name


def lane(name: str, y: float) -> str:
    """The name and the background of a stream on a time axis."""
    return bold(16, y + 25, name) + box(110, y, 434, 40, "lane")


def order_crossed() -> Iterator[str]:
    """Opposite orders of two devices wait for each other; one token gives one order."""
    yield bold(16, 32, "Opposite orders: each waits for the other")
    yield bold(16, 262, "One token: the same order on both")
    pair = ("`all_reduce`", "`reduce_scatter`")
    for device, y in enumerate((50, 170)):
        first, second = pair[::-1] if device == 0 else pair
        yield text(16, y + 27, f"device {device}") + box(108, y, 160, 44, "exposed", first)
        yield box(384, y, 160, 44, "unreached", second)
    yield from (arrow((188, y), (464, 264 - y), colour=EXPOSED) for y in (95, 169))
    yield text(108, 138, "waits for", EXPOSED)
    for device, y in enumerate((280, 380)):
        yield text(16, y + 27, f"device {device}") + box(108, y, 160, 44, "good", pair[0])
        yield box(384, y, 160, 44, "good", pair[1])
        yield arrow((269, y + 22), (383, y + 22), colour=TOKEN)
        yield text(326, y + 14, "token", TOKEN, "middle")
    yield from (arrow((x, 325), (x, 379), colour=GOOD, both=True) for x in (188, 464))
    yield text(326, 357, "both arrive", GOOD, "middle")


def exposure() -> Iterator[str]:
    """A transfer is hidden beside compute, and exposed while compute waits for it."""
    yield lane("compute", 46) + lane("NVLink", 104)
    for x, width, words in ((110, 105, "layer 1"), (215, 105, "layer 2"), (410, 134, "layer 3")):
        yield box(x, 46, width, 40, "compute", words)
    yield text(365, 30, "stands still", EXPOSED, "middle")
    yield box(320, 42, 90, 48, "exposed", "waits")
    yield box(140, 104, 90, 40, "hidden", "gather") + box(244, 104, 76, 40, "hidden", "reduce")
    yield box(320, 104, 90, 40, "exposed", "reduce")
    yield text(185, 164, "hidden", at="middle") + text(282, 164, "hidden", at="middle")
    yield text(365, 164, "exposed", EXPOSED, "middle") + line((454, 104), (454, 198), dashes="5 4")
    yield span(110, 454, 198, "floor: compute alone") + span(454, 544, 198, "exposed", EXPOSED)
    yield span(110, 544, 240, "total")


def schedule_choice() -> Iterator[str]:
    """A decision tree of pipeline schedules: by processes, backward and memory."""
    rows = (
        (0, "How many processes?"),
        (1, "one for the whole mesh: expand-pipeline"),
        (2, "forward only", "`gpipe, circular`"),
        (2, "with a backward"),
        (3, "usual memory", "`eager-1f1b`", "time of GPipe, less memory"),
        (3, "little memory", "`1f1b`", "least memory"),
        (3, "memory to spare", "`circular`", "smallest bubble"),
        (1, "one for each rank: expand-mpmd"),
        (2, "usual memory", "`zb-h1`", "smaller bubble than 1f1b"),
        (2, "little memory", "`v-half, v-min`", "1/2, 1/3 of the activations"),
    )
    above: dict[int, float] = {}
    for number, (depth, words, *schedule) in enumerate(rows):
        x, y = 16 + 32 * depth, 16 + 56 * number
        above[depth] = y + 44
        yield box(x, y, 274 - x, 44, "plain", *words.split(": "))
        if depth:
            yield arrow((x - 16, above[depth - 1]), (x - 16, y + 22), (x - 1, y + 22))
        if schedule:
            yield arrow((274, y + 22), (299, y + 22)) + box(300, y, 244, 44, "good", *schedule)


def mesh() -> Iterator[str]:
    """Eight devices of two hosts as a mesh, with the groups of an all_gather over each axis."""
    for host, x in enumerate((100, 328)):
        yield box(x, 16, 216, 240, "plain") + bold(x + 12, 40, f"host {host}")
    for column, x in enumerate((154, 262, 382, 490)):
        yield text(x, 68, f"data {column}", at="middle") + box(x - 38, 78, 76, 168, "column")
        yield box(x - 26, 98, 52, 48, "white", f"{2 * column}")
        yield box(x - 26, 178, 52, 48, "white", f"{2 * column + 1}")
    for row, y in enumerate((90, 170)):
        yield text(16, y + 37, f"model {row}") + box(108, y, 428, 64, "row")
    yield text(16, 288, "over data: {0, 2, 4, 6} {1, 3, 5, 7}, across hosts", BLUE)
    yield text(16, 314, "over model: {0, 1} {2, 3} {4, 5} {6, 7}, within a host", EXPOSED)


def token_chain() -> Iterator[str]:
    """One token goes through two collectives; the compute between them has none."""
    for x, operand, code in ((104, "x", "`all_gather`"), (398, "y", "`all_reduce`")):
        yield text(x - 22, 28, operand, at="middle") + arrow((x - 22, 34), (x - 22, 49))
        yield box(x, 66, 124, 46, "hidden", code)
        yield box(x - 28, 50, 12, 146, "token") + box(x + 140, 50, 12, 146, "token")
        yield arrow((x - 16, 89), (x - 1, 89)) + arrow((x + 124, 89), (x + 139, 89))
        yield arrow((x - 15, 172), (x + 139, 172), colour=TOKEN)
    yield box(271, 66, 88, 46, "compute", "compute") + arrow((257, 89), (270, 89))
    yield text(313, 134, "no token", MUTED, "middle")
    yield bold(16, 154, "token") + arrow((16, 172), (75, 172), colour=TOKEN)
    yield arrow((257, 172), (369, 172), colour=TOKEN)
    yield box(16, 212, 12, 28, "token") + text(38, 232, "optimization_barrier: no op crosses it")


DRAWINGS = {
    "order-crossed.svg": (order_crossed, 440),
    "exposure.svg": (exposure, 276),
    "schedule-choice.svg": (schedule_choice, 580),
    "mesh.svg": (mesh, 330),
    "token-chain.svg": (token_chain, 256),
}


def written(name: str) -> str:
    """The text of a drawing's file."""
    draw, height = DRAWINGS[name]
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="16"'
    card = box(1, 1, WIDTH - 2, height - 2, "card")
    drawn = f"<title>{escape(draw.__doc__ or name)}</title>{card}{''.join(draw())}</svg>\n"
    drawn = drawn.replace(' stroke-dasharray="none"', "").replace("><", ">\n<")
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{drawn}'


if __name__ == "__main__":
    for file in DRAWINGS:
        (FIGURES / file).write_text(written(file), encoding="utf-8")
