"""Colours: text is readable in both themes, and light finds its dark twin without doubt."""

from __future__ import annotations

import pytest

from weft.report.palette import PALETTE, SERIES, css_variables, dark_of_light, light, series_colour


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "card"])
def test_text_and_series_stand_out(theme: int, ground: str) -> None:
    behind = PALETTE[ground][theme]
    for name in ("ink", "muted", "good", "warn", "bad", "blue"):
        assert contrast(PALETTE[name][theme], behind) >= 4.5, name
    for name in set(SERIES) - {"slate"}:
        assert contrast(PALETTE[name][theme], behind) >= 3, name


def test_every_light_colour_has_one_dark_twin() -> None:
    assert len(dark_of_light()) == len(PALETTE)


def test_the_style_sheet_has_both_themes() -> None:
    sheet = css_variables()
    for name, (day, night) in PALETTE.items():
        assert f"--{name}: {day};" in sheet
        assert f"--{name}: {night};" in sheet


def test_one_series_too_many_begins_again() -> None:
    assert series_colour(len(SERIES)) == series_colour(0) == "blue"
    assert light("blue") == PALETTE["blue"][0]
