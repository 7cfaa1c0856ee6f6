"""Puts the page together and writes it: folder -> facts, charts, tables -> page.html -> report.html.

The page asks the network for nothing. Its policy forbids that outright, and allows only the two scripts whose digests
are in it, so that not even a name that slipped through the escaping could run.
The same folder gives the same bytes: no clock, no random ids.
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
from weft.core.units import format_bytes, format_count, format_seconds
from weft.report import tables
from weft.report.bars import draw_bars
from weft.report.chart import Chart, Entry
from weft.report.coverage_table import coverage
from weft.report.curves import draw_curves
from weft.report.facts import Facts, gather_facts, steps_phrase, verdict
from weft.report.folder import PLAN, RUN, RunFolder, read_folder, table
from weft.report.markup import ABSENT, NOTHING, Markup, facts_list, fold, join, script_json, section, tag, text
from weft.report.palette import css_variables, dark_of_light
from weft.report.pipeline import draw_pipeline, pipeline_tables

REPORT = "report.html"

_STATUS_KIND = {"finished": "good", "stopped": "warn", "failed": "bad"}


def write_page(run_dir: Path) -> Path:
    """Read, draw, write; returns the path of report.html."""
    page = render(read_folder(Path(run_dir)))
    target = Path(run_dir) / REPORT
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


def render(folder: RunFolder) -> str:
    """The page as text."""
    facts = gather_facts(folder)
    plotly, draw = _script(get_plotlyjs()), _script(_resource("draw.js"))
    return Template(_resource("page.html")).substitute(
        policy=_policy(plotly, draw),
        title=text(f"{facts.model} · {steps_phrase(facts)} · weft"),
        colours=css_variables(),
        style=_resource("style.css"),
        head=_head(facts, folder),
        pipeline_link=tag("a", text("Pipeline"), href="#pipeline") + " " if folder.pipeline else "",
        main=_main(facts, folder),
        palette=script_json(dark_of_light()),
        plotly=plotly,
        draw=draw,
    )


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


def _head(facts: Facts, folder: RunFolder) -> Markup:
    kind = _STATUS_KIND.get(facts.status, "plain")
    word = "no record of the end" if facts.status == "unknown" else facts.status
    title = tag("h1", text(facts.model), Markup(" "), tag("span", text(word), class_=f"chip status {kind}"))
    return join([title, tag("p", text(verdict(facts)), class_="verdict"), _remarks(folder.remarks)])


def _remarks(remarks: Sequence[str]) -> Markup:
    if not remarks:
        return NOTHING
    items = (tag("li", text(remark)) for remark in remarks)
    return tag("aside", tag("strong", text("What to know about this folder")), tag("ul", *items), aria_label="Remarks")


def _main(facts: Facts, folder: RunFolder) -> Markup:
    curves, bars = draw_curves(folder), draw_bars(folder)
    steps = folder.metrics.steps
    curves_body = _charts(curves) if curves else tables.absent("No step was recorded, so there is no curve to draw.")
    by_term = (tables.memory_terms(folder), tables.time_terms(folder), tables.traffic(folder))
    terms = tag("div", *by_term, tables.collectives(folder), class_="columns")
    costs = _charts(bars) if bars else tables.absent("No memory or time terms were recorded.")
    return join(
        [
            tag("div", *_tiles(facts), class_="tiles"),
            section(curves_body, tables.sampled_steps(steps), key="curves", title="Curves"),
            section(tables.remarks(folder), costs, terms, key="costs", title="Memory, traffic and time"),
            section(_pipeline(folder), key="pipeline", title="Pipeline"),
            section(tables.dtypes(folder), key="precision", title="Precision"),
            section(coverage(folder), key="coverage", title="Coverage"),
            section(tables.checkpoints(folder), key="checkpoints", title="Checkpoints"),
            section(_documents(folder), key="documents", title="Plan and run, as resolved"),
            section(_environment(facts, folder), key="environment", title="Environment"),
        ]
    )


def _pipeline(folder: RunFolder) -> Markup:
    """Nothing for a run without one."""
    if not folder.pipeline:
        return NOTHING
    charts = draw_pipeline(folder.pipeline)
    if not charts:
        return tables.absent("pipeline.json does not hold the timeline of a schedule.")
    return join([_charts(charts), pipeline_tables(folder.pipeline)])


def _tiles(facts: Facts) -> list[Markup]:
    is_partly_frozen = facts.trainable_parameters is not None and facts.trainable_parameters != facts.parameters
    trainable = f"{format_count(facts.trainable_parameters or 0)} trainable" if is_partly_frozen else ""
    seen = f"{format_count(facts.tokens)} tokens seen" if facts.tokens else ""
    return [
        _tile("Final loss", facts.final_loss, show="{:.4g}".format, note=_loss_note(facts)),
        _tile("Evaluation loss", facts.eval_loss, show="{:.4g}".format, note="held-out data"),
        _tile("Tokens / s", facts.tokens_per_s, show=format_count, note="median over the steps"),
        _tile("Step time", facts.step_s, show=format_seconds, note="median over the steps"),
        _tile("Peak memory", facts.peak_bytes, show=format_bytes, note="largest rank"),
        _tile("Parameters", facts.parameters, show=format_count, note=trainable),
        _tile("Steps", facts.steps_done, show="{:,}".format, note=_steps_note(facts)),
        _tile("Time", facts.elapsed_s, show=format_seconds, note=seen),
    ]


def _loss_note(facts: Facts) -> str:
    if not facts.first_loss or facts.final_loss is None or facts.steps_done < 2:
        return ""
    return f"from {facts.first_loss:.4g} (× {facts.final_loss / facts.first_loss:.2f})"


def _steps_note(facts: Facts) -> str:
    asked = f"of {facts.steps_asked:,} asked" if facts.steps_asked is not None else ""
    skipped = f"{facts.num_skipped} skipped" if facts.num_skipped else ""
    return ", ".join(part for part in (asked, skipped) if part)


def _tile(name: str, value: float | None, *, show: Callable[[float], str], note: str) -> Markup:
    return tag(
        "div",
        tag("span", text(name), class_="name"),
        tag("span", ABSENT if value is None else text(show(value)), class_="value"),
        tag("span", text(note), class_="muted"),
        class_="tile",
    )


def _charts(charts: Sequence[Chart]) -> Markup:
    return tag("div", *map(_chart, charts), class_="charts")


def _chart(chart: Chart) -> Markup:
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


def _legend(entries: Sequence[Entry]) -> Markup:
    if not entries:
        return NOTHING
    return tag("ul", *(tag("li", _swatch(entry), text(entry.words)) for entry in entries), class_="legend")


def _swatch(entry: Entry) -> Markup:
    return tag("span", class_=f"swatch {entry.drawn}", style=f"color: var(--{entry.colour})", aria_hidden="true")


def _documents(folder: RunFolder) -> Markup:
    blocks = [_document(PLAN, folder.plan_text), _document(RUN, folder.run_text)]
    return tag("div", *blocks, class_="columns")


def _document(name: str, content: str | None) -> Markup:
    if content is None:
        return tables.absent(f"{name} is missing.")
    return fold(tag("code", text(name)), tag("pre", tag("code", text(content)), tabindex="0"), is_open=True)


def _environment(facts: Facts, folder: RunFolder) -> Markup:
    run = table(folder.ledger, "run")
    told = [(name, run.get(name)) for name in ("device", "device_name", "started", "resumed_from")]
    versions = sorted(table(run, "versions").items())
    pairs = [(str(name).replace("_", " "), text(value)) for name, value in [*told, *versions] if value is not None]
    ranks = [("ranks", text(facts.num_ranks))] if facts.num_ranks else []
    return facts_list([*ranks, *pairs]) if ranks or pairs else tables.absent("The environment was not recorded.")
