"""The colours of a schedule in a terminal: a hue for each phase, a shade for each chunk.

From the 256 colours that terminals share, hues that stay apart for the colour-blind; letters say
the same, so nothing is lost without them.
"""

from __future__ import annotations

from typing import NamedTuple

MIXED = "M"
_RESET = "\x1b[0m"
_DIM = "\x1b[2m"
_BLACK, _WHITE = 16, 231


class Style(NamedTuple):
    """What a column shows: the letter of a phase, or nothing, and the chunk on its rank."""

    letter: str = ""
    chunk: int = 0


class _Shade(NamedTuple):
    back: int
    text: int


_SHADES = {  # from chunk 0 on
    "F": (_Shade(25, _WHITE), _Shade(74, _BLACK), _Shade(117, _BLACK), _Shade(153, _BLACK)),
    "B": (_Shade(166, _BLACK), _Shade(214, _BLACK), _Shade(222, _BLACK), _Shade(230, _BLACK)),
    "I": (_Shade(125, _WHITE), _Shade(169, _BLACK), _Shade(211, _BLACK), _Shade(225, _BLACK)),
    "W": (_Shade(28, _WHITE), _Shade(71, _BLACK), _Shade(114, _BLACK), _Shade(157, _BLACK)),
    "P": (_Shade(61, _WHITE), _Shade(104, _BLACK), _Shade(147, _BLACK), _Shade(189, _BLACK)),
    ">": (_Shade(240, _WHITE),),
    "<": (_Shade(240, _WHITE),),
    MIXED: (_Shade(245, _BLACK),),
}


def painted(text: str, style: Style) -> str:
    """The text in its colours; dim where the style names no phase."""
    shades = _SHADES.get(style.letter)
    if shades is None:
        return f"{_DIM}{text}{_RESET}"
    shade = shades[style.chunk % len(shades)]
    return f"\x1b[48;5;{shade.back}m\x1b[38;5;{shade.text}m{text}{_RESET}"
