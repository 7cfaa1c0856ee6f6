"""The page's colours, once: the style sheet's variables and the charts are both made from this table.

A chart is built in the light colours; the page's script swaps each for its dark twin, so light values must be distinct.
Contrast: ink, muted, good, warn and bad are text colours and reach 4.5 : 1 on paper and card in both themes.
"""

from __future__ import annotations

PALETTE: dict[str, tuple[str, str]] = {  # name: (light, dark)
    "paper": ("#f7f8fa", "#12151b"),
    "card": ("#ffffff", "#1a1f27"),
    "ink": ("#1b212c", "#e7eaf0"),
    "muted": ("#586274", "#9ea9ba"),
    "line": ("#e3e6eb", "#2d3440"),
    "good": ("#1a7445", "#62cb93"),
    "warn": ("#92580a", "#e9b45c"),
    "bad": ("#b42a2f", "#ff8f8b"),
    "blue": ("#2f66c8", "#7fadff"),
    "orange": ("#cc5f17", "#f2a063"),
    "teal": ("#16857d", "#55c9bd"),
    "purple": ("#7b52c0", "#b99cf4"),
    "slate": ("#97a0b0", "#66717f"),
    "rose": ("#bc3f7d", "#ee8dba"),
    "gold": ("#9a7a0a", "#e0c25c"),
    "sky": ("#2a86ad", "#8accec"),
    "moss": ("#5d7f1d", "#a7ca68"),
    "brick": ("#8a4b3c", "#d29a8a"),
}

SERIES = ("blue", "orange", "teal", "purple", "slate", "rose", "gold", "sky", "moss", "brick")


def light(name: str) -> str:
    return PALETTE[name][0]


def series_colour(index: int) -> str:
    """The name of the colour of the series at `index`; an eleventh series begins again."""
    return SERIES[index % len(SERIES)]


def dark_of_light() -> dict[str, str]:
    """The colours that the page's script swaps in a dark theme."""
    return dict(PALETTE.values())


def css_variables() -> str:
    """The themes as CSS; print is always light, to spare ink."""
    lights = _block({name: pair[0] for name, pair in PALETTE.items()})
    darks = _block({name: pair[1] for name, pair in PALETTE.items()})
    return f"{lights}\n@media (prefers-color-scheme: dark) {{ {darks} }}\n@media print {{ {lights} }}"


def _block(colours: dict[str, str]) -> str:
    return ":root { " + " ".join(f"--{name}: {colour};" for name, colour in colours.items()) + " }"
