"""`draw_svg`: a timeline as a self-contained SVG picture; no script, no font, no style sheet from elsewhere.

Widths are true to time, so unequal stages and measured runs show as they are. Colours name the kind; the later stages
of a rank are darker. Hovering over an action tells its printed form and its times.
"""

from __future__ import annotations

from html import escape

from weft.schedule.actions import Kind
from weft.schedule.draw import chunk_of, label_of, slot_s
from weft.schedule.timeline import Event, Timeline

_COLOURS = {  # of a rank's first stage, of its later ones; white text reaches 4.5 : 1 on all
    Kind.F: ("#2f66c8", "#1d4084"),
    Kind.B: ("#b4520f", "#743408"),
    Kind.I: ("#147a73", "#0b4c47"),
    Kind.W: ("#7b52c0", "#4c317d"),
    Kind.U: ("#bc3f7d", "#bc3f7d"),
}
_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward input", Kind.W: "backward weight", Kind.U: "update"}
_LEFT, _TOP, _ROW, _BAR = 64, 48, 30, 24  # pixels
_STYLE = (
    "svg{background:#fff}text{font:11px sans-serif;fill:#1b212c}.lane{fill:#eceff3}.on{fill:#fff;text-anchor:middle}"
    "@media(prefers-color-scheme:dark){svg{background:#12151b}text{fill:#e7eaf0}.lane{fill:#252b35}}"
)


def draw_svg(timeline: Timeline) -> str:
    schedule, scale = timeline.schedule, _pixels_per_s(timeline)
    width = timeline.makespan_s * scale
    height = _TOP + _ROW * schedule.num_ranks + 12
    title = f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} micro-batches"
    size = f'width="{max(width, 420) + _LEFT + 12:.0f}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="16">{escape(title)}, idle {timeline.bubble_share:.1%}</text>',
        *_legend(timeline),
    ]
    for rank in range(schedule.num_ranks):
        y = _TOP + _ROW * rank
        parts.append(f'<text x="8" y="{y + 16}">rank {rank}</text>')
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}"/>')
    parts += [_bar(timeline, event, scale) for event in timeline.events() if event.end_s > event.start_s]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _pixels_per_s(timeline: Timeline) -> float:
    """About 1,000 pixels in all, but the shortest action neither thinner than 3 nor wider than 28."""
    slot = slot_s(timeline)
    per_slot = 1000 * slot / timeline.makespan_s
    return min(max(per_slot, 3), 28) / slot


def _legend(timeline: Timeline) -> list[str]:
    present = {event.action.kind for event in timeline.events() if event.end_s > event.start_s}
    parts, x = [], _LEFT
    for kind in (kind for kind in Kind if kind in present):
        parts.append(f'<rect x="{x}" y="24" width="12" height="12" rx="2" fill="{_COLOURS[kind][0]}"/>')
        parts.append(f'<text x="{x + 17}" y="34">{_WORDS[kind]}</text>')
        x += 36 + 6 * len(_WORDS[kind])
    return parts


def _bar(timeline: Timeline, event: Event, scale: float) -> str:
    rank, action, start_s, end_s = event
    x, width = _LEFT + (start_s - timeline.origin_s) * scale, (end_s - start_s) * scale
    y = _TOP + _ROW * rank
    colour = _COLOURS[action.kind][min(chunk_of(timeline.schedule, action), 1)]
    times = f"{start_s - timeline.origin_s:g} to {end_s - timeline.origin_s:g}"
    bar = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{colour}" stroke="#fff" '
        f'stroke-width="0.5"><title>{action}, rank {rank}: {times}</title></rect>'
    )
    label = label_of(timeline.schedule, action)[1:]
    if width < 7 * len(label):
        return bar
    return bar + f'<text class="on" x="{x + width / 2:.1f}" y="{y + 16}">{label}</text>'
