"""The page of a training: its tiles and its sections."""

from __future__ import annotations

from pathlib import Path

from weft.core.units import format_bytes, format_count, format_seconds
from weft.report.chart import chart_grid
from weft.report.curves import draw_curves
from weft.report.fields import table
from weft.report.folder import PLAN, RUN, TrainingFolder, read_folder
from weft.report.markup import Markup, absent, document, facts_list, join, tag, tile
from weft.report.page import Page, PageSection
from weft.report.training import costs, tables
from weft.report.training.coverage_table import coverage
from weft.report.training.evaluations import draw_evaluations, evaluation_table
from weft.report.training.experts import draw_experts
from weft.report.training.facts import TrainingFacts, gather_facts, verdict
from weft.report.training.pipeline import pipeline_section
from weft.report.training.profiled import profile_section

_TERMS = (costs.memory_terms, costs.time_terms, costs.traffic, costs.offload, costs.collectives)


def build_training_page(run_dir: Path) -> Page:
    """The page of the run folder; RunFolderError where there is no run to draw."""
    folder = read_folder(run_dir)
    facts = gather_facts(folder)
    return Page(
        title=f"{facts.model} · {facts.steps_phrase}",
        heading=facts.model,
        status=facts.status,
        verdict=verdict(facts),
        remarks=folder.remarks,
        tiles=_tiles(facts),
        sections=_sections(facts, folder),
    )


def _sections(facts: TrainingFacts, folder: TrainingFolder) -> list[PageSection]:
    steps = folder.metrics.steps
    curves = chart_grid([*draw_curves(folder), draw_evaluations(steps)]) or absent(
        "No step was recorded, so there is no curve to draw."
    )
    bars = chart_grid(costs.draw_costs(folder)) or absent("No memory or time terms were recorded.")
    terms = [part(folder) for part in _TERMS]
    documents = [document(PLAN, folder.plan_text), document(RUN, folder.run_text)]
    return [
        PageSection(
            key="curves",
            title="Curves",
            content=join([curves, evaluation_table(steps), tables.bad_steps(folder), tables.sampled_steps(steps)]),
        ),
        PageSection(key="samples", title="Samples", content=tables.written_texts(folder)),
        PageSection(
            key="costs",
            title="Memory, traffic and time",
            content=join([costs.remarks(folder), bars, tag("div", *terms, class_="columns")]),
        ),
        PageSection(key="pipeline", title="Pipeline", content=pipeline_section(folder.pipeline)),
        PageSection(key="profile", title="Profile", content=profile_section(folder)),
        PageSection(key="experts", title="Experts", content=chart_grid(draw_experts(folder))),
        PageSection(
            key="precision",
            title="Precision",
            content=join([tables.dtypes(folder), tables.float8_accuracy(folder)]),
        ),
        PageSection(key="coverage", title="Coverage", content=coverage(folder)),
        PageSection(key="checkpoints", title="Checkpoints", content=tables.checkpoints(folder)),
        PageSection(
            key="documents",
            title="Plan and run, as resolved",
            link="Plan and run",
            content=tag("div", *documents, class_="columns"),
        ),
        PageSection(key="environment", title="Environment", content=_environment(facts, folder)),
    ]


def _tiles(facts: TrainingFacts) -> list[Markup]:
    is_partly_frozen = facts.trainable_parameters is not None and facts.trainable_parameters != facts.parameters
    trainable = f"{format_count(facts.trainable_parameters or 0)} trainable" if is_partly_frozen else ""
    seen = f"{format_count(facts.tokens)} tokens seen" if facts.tokens else ""
    skipped = f"{facts.num_skipped} skipped" if facts.num_skipped else ""
    steps_note = ", ".join(part for part in (facts.steps_note, skipped) if part)
    return [
        tile("Final loss", facts.final_loss, show="{:.4g}".format, note=_loss_note(facts)),
        tile("Evaluation loss", facts.eval_loss, show="{:.4g}".format, note=facts.no_evaluation or "held-out data"),
        tile("Tokens / s", facts.tokens_per_s, show=format_count, note="median over the steps"),
        tile("Step time", facts.step_s, show=format_seconds, note="median over the steps"),
        tile("Peak memory", facts.peak_bytes, show=format_bytes, note="largest rank"),
        tile("Parameters", facts.parameters, show=format_count, note=trainable),
        tile("Steps", facts.steps_done, show="{:,.0f}".format, note=steps_note),
        tile("Time", facts.elapsed_s, show=format_seconds, note=seen),
    ]


def _loss_note(facts: TrainingFacts) -> str:
    if not facts.first_loss or facts.final_loss is None or facts.steps_done < 2:
        return ""
    return f"from {facts.first_loss:.4g} (× {facts.final_loss / facts.first_loss:.2f})"


def _environment(facts: TrainingFacts, folder: TrainingFolder) -> Markup:
    run = table(folder.ledger, "run")
    recorded = [(name, run.get(name)) for name in ("device", "device_name", "started", "resumed_from")]
    pairs = [("ranks", facts.num_ranks or None), *recorded, *sorted(table(run, "versions").items())]
    return facts_list(pairs, otherwise="The environment was not recorded.")
