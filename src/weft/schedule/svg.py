"""`draw_svg`: a timeline as an SVG picture, separate or inside a page. No script, no external font or style sheet.

Widths are proportional to time, so unequal stages and measured runs show as they are. Colours name the kind of action;
later stages of a rank are darker, an idle rank shows its grey lane. Hovering over a bar shows its action and times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from weft.schedule.actions import Kind
from weft.schedule.draw import chunk_of, label_of, slot_s
from weft.schedule.measured import Gap
from weft.schedule.timeline import TimedAction, Timeline

_COLOURS = {  # of the first and of later stages of a rank; white text has a contrast of at least 4.5 : 1 on each
    Kind.F.words: ("#2f66c8", "#1d4084"),
    Kind.B.words: ("#b4520f", "#743408"),
    Kind.I.words: ("#147a73", "#0b4c47"),
    Kind.W.words: ("#7b52c0", "#4c317d"),
    Kind.U.words: ("#bc3f7d", "#bc3f7d"),
    "receive": ("#8a6d09", "#8a6d09"),
    "send": ("#23789b", "#23789b"),
    "idle": ("", ""),  # the lane
}
_LEFT, _ROW, _BAR = 64, 30, 24  # pixels
_TICKS = 5
# The variables are those of the report's page, which has themes; a separate picture uses the defaults.
_STYLE = (
    ".timeline{background:var(--card,#fff)}.timeline text{font:11px sans-serif;fill:var(--ink,#1b212c)}"
    ".timeline .lane{fill:var(--line,#eceff3)}.timeline text.on{fill:#fff;text-anchor:middle;pointer-events:none}"
    "@media(prefers-color-scheme:dark){.timeline{background:var(--card,#12151b)}"
    ".timeline text{fill:var(--ink,#e7eaf0)}.timeline .lane{fill:var(--line,#252b35)}}"
    ".timeline .bar{stroke:#fff;stroke-width:.5;rx:2px}.timeline .idle{fill:none;stroke:none;pointer-events:all}"
) + "".join(
    f".timeline .{word.replace(' ', '-')}{{fill:{first}}}.timeline .{word.replace(' ', '-')}.later{{fill:{later}}}"
    for word, (first, later) in _COLOURS.items()
    if first
)


def draw_svg(
    timeline: Timeline,
    *,
    gaps: Iterable[Gap] = (),
    rank_names: Sequence[str] | None = None,
    scale: float | None = None,
    end_s: float | None = None,
    show: Callable[[float], str] | None = None,
) -> str:
    """The picture. `rank_names`: names of the first ranks, which are drawn; `scale`: pixels per second.

    `end_s` is the end of the time axis. `show` formats seconds for the axis and the hover text; without it the times
    are the plain costs of a simulation and there is no axis.
    """
    schedule = timeline.schedule
    names = rank_names or [f"rank {rank}" for rank in range(schedule.num_ranks)]
    scale = scale or pixels_per_s(timeline)
    width = max(timeline.makespan_s, end_s or 0) * scale
    top = 24 if show else 44  # inside a page the title is around the picture
    bottom = top + _ROW * len(names)
    full_width, height = max(width, 420) + _LEFT + 28, bottom + (22 if show else 6)
    title = f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} micro-batches"
    found: list[TimedAction | Gap] = [*timeline.events(), *gaps]
    bars = [bar for bar in found if bar.rank < len(names) and bar.end_s > bar.start_s]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" viewBox="0 0 {full_width:.0f} {height}" '
        f'width="{full_width:.0f}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        "" if show else f'<text x="{_LEFT}" y="14">{escape(title)}, idle {timeline.bubble_share:.1%}</text>',
        *_legend(top - 22, [word for word in _COLOURS if word == "idle" or any(_word(bar) == word for bar in bars)]),
    ]
    for rank, name in enumerate(names):
        lane = f'x="{_LEFT}" y="{top + _ROW * rank}" width="{timeline.makespan_s * scale:.1f}" height="{_BAR}"'
        parts.append(f'<text x="8" y="{top + _ROW * rank + 16}">{escape(name)}</text><rect class="lane" {lane}/>')
    show_time = show or "{:g}".format
    parts += [_bar(timeline, bar, names[bar.rank], scale, top, show_time) for bar in bars]
    if show:
        ticks = [width * tick / _TICKS for tick in range(_TICKS + 1)]
        parts += [f'<text x="{_LEFT + x:.0f}" y="{bottom + 12}">{escape(show(x / scale))}</text>' for x in ticks]
    return "\n".join([*parts, "</svg>"]) + "\n"


def pixels_per_s(timeline: Timeline) -> float:
    """About 1,000 pixels for the timeline, with the shortest action between 3 and 28 pixels wide."""
    slot = slot_s(timeline)
    per_slot = 1000 * slot / timeline.makespan_s
    return min(max(per_slot, 3), 28) / slot


def _word(bar: TimedAction | Gap) -> str:
    return bar.action.kind.words if isinstance(bar, TimedAction) else str(bar.kind)


def _legend(y: int, words: Sequence[str]) -> list[str]:
    parts, x = [], _LEFT
    for word in words:
        look = "lane" if word == "idle" else f"bar {word.replace(' ', '-')}"
        parts.append(f'<rect class="{look}" x="{x}" y="{y}" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{word}</text>')
        x += 36 + 6 * len(word)
    return parts


def _bar(
    timeline: Timeline, bar: TimedAction | Gap, name: str, scale: float, top: int, show: Callable[[float], str]
) -> str:
    """The bar of an action or a wait; idle time has a hover text and no colour."""
    start_s, length_s = bar.start_s - timeline.origin_s, bar.end_s - bar.start_s
    x, y, width = _LEFT + start_s * scale, top + _ROW * bar.rank, length_s * scale
    look, label, hover = _word(bar).replace(" ", "-"), "", _word(bar)
    if isinstance(bar, TimedAction):
        look += " later" if chunk_of(timeline.schedule, bar.action) > 0 else ""
        label = label_of(timeline.schedule, bar.action)[1:]
        hover = f"{bar.action}, stage {bar.action.stage}, micro-batch {bar.action.microbatch}"
    drawn = (
        f'<rect class="bar {look}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}">'
        f"<title>{hover}, {escape(name)}: {show(length_s)} from {show(start_s)} on</title></rect>"
    )
    if not label or width < 7 * len(label):
        return drawn
    return drawn + f'<text class="on" x="{x + width / 2:.1f}" y="{y + 16}">{label}</text>'
