"""The learning rate of a run before it begins: a picture for the terminal and a small page with an SVG.

Input are numbers: one rate per step, and the peak of every parameter group. No training, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.report.markup import Markup, grid, tag, text
from weft.report.page import Page, PageSection

COLUMNS, ROWS = 64, 10
_WIDTH, _HEIGHT, _MARGIN = 640, 220, 8  # pixels
_MOST_POINTS = 1_000


def draw_rates(rates: Sequence[float], *, title: str) -> str:
    """Bars of eighths of a line: the mean rate of each column's steps, and the rates of the edges."""
    peak = max(rates, default=0.0) or 1.0
    columns = min(COLUMNS, len(rates))
    means = [_mean(rates, column, columns) / peak for column in range(columns)]
    lines = [title]
    for row in range(ROWS, 0, -1):
        mark = f"{peak * row / ROWS:9.3g} " if row in (ROWS, ROWS // 2) else " " * 10
        lines.append(mark + "".join(_eighths(mean * ROWS - (row - 1)) for mean in means))
    lines.append(f"{'step':>9} 1{str(len(rates)).rjust(columns - 1)}")
    return "\n".join(lines)


def rates_page(rates: Sequence[float], *, title: str, groups: Mapping[str, tuple[float, str]]) -> Page:
    """A page without scripts. `groups`: the peak rate and the decay in words, by pattern."""
    rows = [[text(name), text(f"{peak:g}"), text(decay)] for name, (peak, decay) in groups.items()]
    table = grid(
        rows, columns=("parameters", "peak learning rate", "weight decay"), caption="Parameter groups", numeric=(1,)
    )
    caption = (
        f"{len(rates):,} steps: {rates[0]:.3g} in the first, {max(rates):.3g} at most, {rates[-1]:.3g} in the last"
    )
    figure = tag("figure", _svg(rates), tag("figcaption", text(caption)))
    return Page(
        title=title,
        heading=title,
        status="not started",
        verdict="The learning rate of every step, drawn before the run.",
        sections=(
            PageSection(key="schedule", title="Learning rate", content=figure),
            PageSection(key="groups", title="Parameter groups", content=table),
        ),
        has_charts=False,
    )


def _svg(rates: Sequence[float]) -> Markup:
    peak, last = max(rates) or 1.0, max(1, len(rates) - 1)
    every = max(1, len(rates) // _MOST_POINTS)
    places = [*range(0, len(rates), every), len(rates) - 1]
    points = " ".join(
        f"{_MARGIN + place / last * _WIDTH:.1f},{_MARGIN + (1 - rates[place] / peak) * _HEIGHT:.1f}" for place in places
    )
    box = f"0 0 {_WIDTH + 2 * _MARGIN} {_HEIGHT + 2 * _MARGIN}"
    line = f'<polyline points="{points}" fill="none" stroke="var(--ink, #2f66c8)" stroke-width="2"/>'
    base = f'<path d="M{_MARGIN} {_MARGIN + _HEIGHT}h{_WIDTH}" stroke="var(--line, #ccc)"/>'
    return Markup(f'<svg viewBox="{box}" role="img" aria-label="learning rate by step">{base}{line}</svg>')


def _mean(rates: Sequence[float], column: int, columns: int) -> float:
    part = rates[column * len(rates) // columns : (column + 1) * len(rates) // columns]
    return sum(part) / len(part)


def _eighths(height: float) -> str:
    return " ▁▂▃▄▅▆▇█"[max(0, min(8, round(height * 8)))]
