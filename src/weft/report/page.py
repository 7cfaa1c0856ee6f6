"""The page of a training run: folder -> facts, charts, tables -> sections. The page around them is in shell."""

from __future__ import annotations

from pathlib import Path

from weft.core.units import format_bytes, format_count, format_seconds
from weft.report import shell, tables
from weft.report.bars import draw_bars
from weft.report.coverage_table import coverage
from weft.report.curves import draw_curves
from weft.report.facts import Facts, gather_facts, steps_phrase, verdict
from weft.report.folder import PLAN, RUN, RunFolder, read_folder, table
from weft.report.markup import NOTHING, Markup, facts_list, join, section, tag, text
from weft.report.pipeline import draw_pipeline, pipeline_tables
from weft.report.shell import chart_boxes, document, tile


def write_page(run_dir: Path) -> Path:
    """Read, draw, write; returns the path of report.html."""
    return shell.write_text(Path(run_dir), render(read_folder(Path(run_dir))))


def render(folder: RunFolder) -> str:
    """The page as text."""
    facts = gather_facts(folder)
    return shell.fill(
        title=f"{facts.model} · {steps_phrase(facts)}",
        head=shell.head(title=facts.model, status=facts.status, verdict=verdict(facts), remarks=folder.remarks),
        links=_links(folder),
        main=_main(facts, folder),
    )


def _links(folder: RunFolder) -> list[tuple[str, str]]:
    return [
        ("curves", "Curves"),
        ("costs", "Memory, traffic and time"),
        *([("pipeline", "Pipeline")] if folder.pipeline else []),
        ("precision", "Precision"),
        ("coverage", "Coverage"),
        ("checkpoints", "Checkpoints"),
        ("documents", "Plan and run"),
        ("environment", "Environment"),
    ]


def _main(facts: Facts, folder: RunFolder) -> Markup:
    curves, bars = draw_curves(folder), draw_bars(folder)
    steps = folder.metrics.steps
    curves_body = (
        chart_boxes(curves) if curves else tables.absent("No step was recorded, so there is no curve to draw.")
    )
    by_term = (tables.memory_terms(folder), tables.time_terms(folder), tables.traffic(folder))
    terms = tag("div", *by_term, tables.collectives(folder), class_="columns")
    costs = chart_boxes(bars) if bars else tables.absent("No memory or time terms were recorded.")
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
    return join([chart_boxes(charts), pipeline_tables(folder.pipeline)])


def _tiles(facts: Facts) -> list[Markup]:
    is_partly_frozen = facts.trainable_parameters is not None and facts.trainable_parameters != facts.parameters
    trainable = f"{format_count(facts.trainable_parameters or 0)} trainable" if is_partly_frozen else ""
    seen = f"{format_count(facts.tokens)} tokens seen" if facts.tokens else ""
    return [
        tile("Final loss", facts.final_loss, show="{:.4g}".format, note=_loss_note(facts)),
        tile("Evaluation loss", facts.eval_loss, show="{:.4g}".format, note=facts.no_evaluation or "held-out data"),
        tile("Tokens / s", facts.tokens_per_s, show=format_count, note="median over the steps"),
        tile("Step time", facts.step_s, show=format_seconds, note="median over the steps"),
        tile("Peak memory", facts.peak_bytes, show=format_bytes, note="largest rank"),
        tile("Parameters", facts.parameters, show=format_count, note=trainable),
        tile("Steps", facts.steps_done, show="{:,}".format, note=_steps_note(facts)),
        tile("Time", facts.elapsed_s, show=format_seconds, note=seen),
    ]


def _loss_note(facts: Facts) -> str:
    if not facts.first_loss or facts.final_loss is None or facts.steps_done < 2:
        return ""
    return f"from {facts.first_loss:.4g} (× {facts.final_loss / facts.first_loss:.2f})"


def _steps_note(facts: Facts) -> str:
    asked = f"of {facts.steps_asked:,} asked" if facts.steps_asked is not None else ""
    skipped = f"{facts.num_skipped} skipped" if facts.num_skipped else ""
    return ", ".join(part for part in (asked, skipped) if part)


def _documents(folder: RunFolder) -> Markup:
    blocks = [document(PLAN, folder.plan_text), document(RUN, folder.run_text)]
    return tag("div", *blocks, class_="columns")


def _environment(facts: Facts, folder: RunFolder) -> Markup:
    run = table(folder.ledger, "run")
    told = [(name, run.get(name)) for name in ("device", "device_name", "started", "resumed_from")]
    versions = sorted(table(run, "versions").items())
    pairs = [(str(name).replace("_", " "), text(value)) for name, value in [*told, *versions] if value is not None]
    ranks = [("ranks", text(facts.num_ranks))] if facts.num_ranks else []
    return facts_list([*ranks, *pairs]) if ranks or pairs else tables.absent("The environment was not recorded.")
