"""The page of a run on parameter servers: its tiles and its sections.

With other runs beside it the curves of all are drawn together; the other sections belong to the first run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.core.units import format_bytes, format_count, format_seconds
from weft.report.chart import chart_grid
from weft.report.fields import table
from weft.report.folder import RUN, ServerFolder, read_server_folder
from weft.report.markup import NOTHING, Markup, absent, document, facts_list, join, tag, tile
from weft.report.page import Page, PageSection
from weft.report.server import charts, tables
from weft.report.server.compare import draw_beside
from weft.report.server.facts import ServerFacts, gather_server_facts, run_names, verdict
from weft.report.server.load import hot_keys, server_loads, update_word, waiting_share, worker_loads

MAX_HOT_TABLES = 6


def build_server_page(run_dir: Path, *, beside: Sequence[Path] = ()) -> Page:
    """The page of the run folder; RunFolderError where one of the folders is not a run on servers."""
    folder = read_server_folder(run_dir)
    others = {other.resolve(): other for other in beside if other.resolve() != run_dir.resolve()}  # each once
    folders = [read_server_folder(other) for other in others.values()]
    facts = gather_server_facts(folder)
    remarks = [f"{other.path.resolve().name}: {remark}" for other in folders for remark in other.remarks]
    return Page(
        title=f"{facts.model} · {facts.mode or 'parameter servers'} · {facts.steps_phrase}",
        heading=facts.model,
        status=facts.status,
        verdict=verdict(facts),
        remarks=[*folder.remarks, *remarks],
        tiles=_tiles(facts, folder),
        sections=[
            PageSection(key="beside", title="Beside other runs", content=_beside(facts, folder, folders)),
            PageSection(key="curves", title="Curves", content=_curves(folder)),
            PageSection(key="staleness", title="Staleness", content=_staleness(facts, folder)),
            PageSection(key="servers", title="Servers", content=_servers(folder)),
            PageSection(key="workers", title="Workers", content=_workers(folder)),
            PageSection(key="hot-keys", title="Hot keys", content=_hot_keys(folder)),
            PageSection(key="events", title="Events", content=tables.events(folder)),
            PageSection(key="documents", title="Run, as resolved", link="Run", content=document(RUN, folder.run_text)),
            PageSection(key="environment", title="Environment", content=_environment(folder)),
        ],
    )


def _tiles(facts: ServerFacts, folder: ServerFolder) -> list[Markup]:
    elapsed = f"of training; {format_seconds(facts.elapsed_s)} in all" if facts.elapsed_s is not None else "of training"
    first = f"from {facts.first_loss:.4g}" if facts.first_loss is not None and facts.steps_done > 1 else ""
    return [
        tile("Final loss", facts.final_loss, show="{:.4g}".format, note=first),
        tile("Held-out loss", facts.eval_loss, show="{:.4g}".format, note="last evaluation"),
        tile("AUC", facts.auc, show="{:.4f}".format, note="last evaluation"),
        tile("Samples / s", facts.samples_per_s, show=format_count, note="over all workers"),
        tile("Rows in tables", facts.rows, show=format_count, note="over all servers"),
        tile("Memory of tables", facts.bytes, show=format_bytes, note="over all servers"),
        tile("Staleness, mean", facts.staleness_mean, show="{:.2f}".format, note=_staleness_note(facts)),
        tile("Staleness, largest", facts.staleness_max, show="{:,.0f}".format, note=_bound_note(facts)),
        tile("Waiting", waiting_share(worker_loads(folder)), show="{:.0%}".format, note="of the workers' time"),
        tile("Steps", facts.steps_done, show="{:,.0f}".format, note=facts.steps_note),
        tile("Time", facts.train_s, show=format_seconds, note=elapsed),
        tile("Restarts", facts.restarts, show="{:,.0f}".format, note="of servers and workers"),
    ]


def _staleness_note(facts: ServerFacts) -> str:
    if facts.staleness_mean is None:
        return "geo exchanges have none" if facts.mode == "geo" else ""
    return "units per push"


def _bound_note(facts: ServerFacts) -> str:
    if facts.staleness_max is None:
        return ""
    return f"units; bound {facts.staleness_bound:,}" if facts.staleness_bound is not None else "units; no bound"


def _beside(facts: ServerFacts, folder: ServerFolder, beside: Sequence[ServerFolder]) -> Markup:
    if not beside:
        return NOTHING
    folders = [folder, *beside]
    names = run_names(folders)
    all_facts = [facts, *map(gather_server_facts, beside)]
    return join([*map(chart_grid, draw_beside(names, folders)), tables.beside(names, all_facts)])


def _curves(folder: ServerFolder) -> Markup:
    drawn = chart_grid(charts.draw_curves(folder))
    if not drawn:
        return absent("No step was recorded, so there is no curve to draw.")
    return join([drawn, tables.evaluations(folder.metrics.steps)])


def _staleness(facts: ServerFacts, folder: ServerFolder) -> Markup:
    has_none = "Geo exchanges carry changes of local tables, not gradients of a pull: they have no staleness."
    otherwise = has_none if facts.mode == "geo" else "No staleness was recorded."
    return chart_grid([charts.draw_histogram(folder)]) or absent(otherwise)


def _servers(folder: ServerFolder) -> Markup:
    loads = server_loads(folder)
    if not loads:
        return absent("No figures of servers were recorded.")
    return join([*map(chart_grid, charts.draw_servers(loads)), tables.servers(loads)])


def _workers(folder: ServerFolder) -> Markup:
    loads = worker_loads(folder)
    drawn = chart_grid([charts.draw_workers(loads)])
    return join([drawn, tables.workers(loads)]) if drawn else absent("No times of workers were recorded.")


def _hot_keys(folder: ServerFolder) -> Markup:
    found = list(hot_keys(folder).items())
    if not found:
        return absent("No hot keys were recorded.")
    of, pieces = update_word(folder), []
    for place, (name, keys) in enumerate(found[:MAX_HOT_TABLES]):
        pieces.append(charts.draw_hot_keys(name, keys, of=of, place=place).box())
        pieces.append(tables.hot_keys(name, keys, of=of))
    rest = len(found) - MAX_HOT_TABLES
    more = absent(f"Those of {rest} more tables are in server.json.") if rest > 0 else NOTHING
    return join([tag("div", *pieces, class_="columns"), more])


def _environment(folder: ServerFolder) -> Markup:
    spec = table(folder.run, "server")
    chosen = [(name, spec.get(name)) for name in ("launcher", "durability")]
    pairs = [*chosen, *sorted(table(folder.ledger, "machine").items())]
    return facts_list(pairs, otherwise="The environment was not recorded.")
