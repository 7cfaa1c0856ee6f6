"""What every page shares: the template with its policy, the head, tiles, boxes of charts, and the writing of the file.

The page asks the network for nothing. Its policy forbids that outright, and allows only the two scripts whose digests
are in it, so that not even a name that slipped through the escaping could run.
The same content gives the same bytes: no clock, no random ids.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from weft.core.errors import RunFolderError
from weft.report.chart import Chart, Entry
from weft.report.markup import ABSENT, NOTHING, Markup, fold, join, script_json, tag, text
from weft.report.palette import css_variables, dark_of_light
from weft.report.tables import absent

REPORT = "report.html"

_STATUS_KIND = {"finished": "good", "stopped": "warn", "failed": "bad"}


def write_text(run_dir: Path, page: str) -> Path:
    """Writes report.html; returns its path."""
    target = run_dir / REPORT
    draft = target.with_name(f"{REPORT}.{os.getpid()}.tmp")
    try:
        draft.write_text(page, encoding="utf-8", newline="\n")
        draft.replace(target)  # in one move: a reader never sees half a page
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise RunFolderError(
            f"{target} cannot be written: {error.strerror}", hint="check space and permissions"
        ) from None
    return target


def fill(*, title: str, head: Markup, links: Sequence[tuple[str, str]], main: Markup) -> str:
    """The page as text; `links` are (key of a section, words)."""
    plotly, draw = _script(get_plotlyjs()), _script(_resource("draw.js"))
    return Template(_resource("page.html")).substitute(
        policy=_policy(plotly, draw),
        title=text(f"{title} · weft"),
        colours=css_variables(),
        style=_resource("style.css"),
        head=head,
        links=" ".join(tag("a", text(words), href=f"#{key}") for key, words in links),
        main=main,
        palette=script_json(dark_of_light()),
        plotly=plotly,
        draw=draw,
    )


def head(*, title: str, status: str, verdict: str, remarks: Sequence[str]) -> Markup:
    kind = _STATUS_KIND.get(status, "plain")
    word = "no record of the end" if status == "unknown" else status
    heading = tag("h1", text(title), Markup(" "), tag("span", text(word), class_=f"chip status {kind}"))
    return join([heading, tag("p", text(verdict), class_="verdict"), _remarks(remarks)])


def tile(name: str, value: float | None, *, show: Callable[[float], str], note: str) -> Markup:
    return tag(
        "div",
        tag("span", text(name), class_="name"),
        tag("span", ABSENT if value is None else text(show(value)), class_="value"),
        tag("span", text(note), class_="muted"),
        class_="tile",
    )


def chart_boxes(charts: Sequence[Chart]) -> Markup:
    return tag("div", *map(chart_box, charts), class_="charts")


def chart_box(chart: Chart) -> Markup:
    """The figure's box keeps its height before it is drawn, so the page does not jump."""
    box = tag(
        "div",
        class_="plot",
        data_figure=f"figure-{chart.key}",
        role="img",
        aria_label=f"{chart.title}. {chart.caption}",
        style=f"min-height: {chart.height}px",
    )
    spec = tag("script", script_json(chart.as_json()), type="application/json", id=f"figure-{chart.key}")
    words = tag("figcaption", tag("h3", text(chart.title)), tag("p", text(chart.caption)), _legend(chart.legend))
    return tag("figure", words, box, spec, class_="wide" if chart.is_wide else "half")


def document(name: str, content: str | None) -> Markup:
    if content is None:
        return absent(f"{name} is missing.")
    return fold(tag("code", text(name)), tag("pre", tag("code", text(content)), tabindex="0"), is_open=True)


def _resource(name: str) -> str:
    return files("weft.report").joinpath(name).read_text(encoding="utf-8")


def _script(source: str) -> str:
    # A browser reads \r\n as \n before it takes the digest; a script with \r would be refused.
    return source.replace("\r\n", "\n").replace("\r", "\n")


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _remarks(remarks: Sequence[str]) -> Markup:
    if not remarks:
        return NOTHING
    items = (tag("li", text(remark)) for remark in remarks)
    return tag("aside", tag("strong", text("What to know about this folder")), tag("ul", *items), aria_label="Remarks")


def _legend(entries: Sequence[Entry]) -> Markup:
    if not entries:
        return NOTHING
    return tag("ul", *(tag("li", _swatch(entry), text(entry.words)) for entry in entries), class_="legend")


def _swatch(entry: Entry) -> Markup:
    return tag("span", class_=f"swatch {entry.drawn}", style=f"color: var(--{entry.colour})", aria_hidden="true")
