"""The terminal output of `weft plan` and `weft inference`: a table with memory bars, the reasons, the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.core.units import format_bytes, format_count, format_seconds
from weft.plan.time.documents import documents_note
from weft.plan.trained import best_trained, why_not_trained
from weft.plan.words import describe

if TYPE_CHECKING:
    from weft.core.model_shape import ModelShape
    from weft.plan.ask import Question
    from weft.plan.estimate import Estimate
    from weft.plan.inference import InferenceEstimate
    from weft.plan.offload import OffloadRecord
    from weft.plan.search import Answer

BAR_WIDTH = 20
# (name, sign, colour, memory terms), in the order of drawing
GROUPS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("states", "█", "blue", ("weights", "optimizer_state", "gradients", "weight_versions")),
    ("gathered", "▓", "cyan", ("gathered_weights", "communication_buffers")),
    ("activations", "▒", "green", ("activations",)),
    ("loss", "░", "yellow", ("logits_and_loss",)),
    ("other", "·", "magenta", ("temporaries", "buffers", "framework", "other")),
)


def show(question: Question, answer: Answer, *, confirmed: list[str] | None = None) -> None:
    """Print the answer on stdout; `confirmed` adds a column with the dry runs."""
    console = Console(stderr=False, highlight=False)
    console.print(_headline(question))
    for line in question.assumed:
        console.print(f"assumed: {line}", style="dim")
    console.print(_table(answer, confirmed))
    if confirmed is None:
        console.print(_legend())
    for title, lines in _sections(answer):
        console.print(f"[bold]{title}[/bold]")
        for line in lines:
            console.print(f"  {line}", markup=False)


def show_arithmetic(answer: Answer, what: str) -> None:
    """Print the terms of the best plan: --explain."""
    console = Console(highlight=False)
    best = answer.plans[0]
    if what == "memory":
        _show_memory(console, answer, best)
    elif what == "precision":
        _show_precision(console, answer, best)
    elif what == "time":
        total = best.step_s
        rows = [
            (term, format_seconds(value), f"{value / total:.1%}") for term, value in best.time_terms.items() if value
        ]
        _print_rows(console, ("time", "seconds", "share"), rows)
        if note := documents_note(answer.request):
            console.print(note, markup=False)
        _show_work(console, answer, best)
    else:
        traffic = [
            (r["axis"], r["collective"], r["phase"], f"{r['count']:,}", format_bytes(int(r["bytes"])))
            for r in best.traffic
        ]
        _print_rows(console, ("axis", "collective", "phase", "calls per step", "sent per rank"), traffic)


def show_inference(shape: ModelShape, found: InferenceEstimate) -> None:
    console, plural = Console(highlight=False), "" if found.num_devices == 1 else "s"
    console.print(
        f"{shape.name}: {format_count(shape.num_parameters)} parameters on {found.num_devices} device{plural}"
    )
    cache, per_token = found.cache_bytes_per_sequence, found.cache_bytes_per_token + found.scale_bytes_per_token
    rows = [
        ("weights", found.weights, format_bytes(found.weight_bytes)),
        (
            "KV cache",
            f"{found.cache}, {found.concurrent} x {found.context:,} tokens",
            format_bytes(found.concurrent * cache),
        ),
        ("framework", "context, workspaces", format_bytes(found.overhead_bytes)),
        ("total", "fits" if found.fits else "does not fit", format_bytes(found.total_bytes)),
        ("capacity", "per device", format_bytes(found.capacity_bytes)),
    ]
    _print_rows(console, ("per device", "", "bytes"), rows)
    console.print(
        f"{format_bytes(per_token)} of cache per token, {format_bytes(cache)} per sequence: "
        f"{found.max_concurrent:,} sequences of {found.context:,} tokens fit"
    )


def _headline(question: Question) -> str:
    request = question.request
    shape, cluster, workload = request.shape, request.cluster, request.workload
    about = "" if shape.is_exact else "about "
    return (
        f"{shape.name or shape.model_type}: {about}{format_count(shape.num_parameters)} parameters, "
        f"{shape.num_layers} blocks; "
        f"{cluster.name} ({cluster.num_devices:,} x {format_bytes(cluster.device.memory_bytes)}); "
        f"{workload.global_batch:,} x {workload.sequence_length:,} tokens per step, {workload.optimizer}, "
        f"{question.precision.get('preset', '')}"
    )


def _table(answer: Answer, confirmed: list[str] | None) -> Table:
    """One row per plan; with dry runs there are no bars: predicted and dry-run memory are side by side."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    plain, with_dry_runs = ("memory", "", "step", "tokens/s", "MFU"), ("memory", "step", "MFU", "dry run, allocated")
    for name in ("", "layout", *(plain if confirmed is None else with_dry_runs)):
        is_left = name == "layout" or (name == "memory" and confirmed is None)
        table.add_column(name, justify="left" if is_left else "right", no_wrap=name != "layout")
    for place, found in enumerate(answer.plans):
        memory = format_bytes(found.memory_bytes) + ("" if found.fits else " too much")
        step, mfu = format_seconds(found.step_s), f"{found.mfu:.0%}"
        if confirmed is None:
            bar = _bar(found, answer.request.cluster.device.memory_bytes)
            cells: tuple[str | Text, ...] = (bar, memory, step, format_count(found.tokens_per_s), mfu)
        else:
            cells = (memory, step, mfu, confirmed[place])
        table.add_row(str(place + 1), describe(found.plan), *cells)
    return table


def _bar(found: Estimate, capacity_bytes: int) -> Text:
    """A device's memory by groups of terms; one that is too small ends in >>."""
    bar = Text()
    for _, sign, colour, terms in GROUPS:
        share = sum(found.memory_terms.get(term, 0) for term in terms) / capacity_bytes
        bar.append(sign * round(share * BAR_WIDTH), style=colour)
    if len(bar) > BAR_WIDTH:
        bar.truncate(BAR_WIDTH - 2)
        bar.append(">>", style="red")
    bar.append(" " * (BAR_WIDTH - len(bar)))
    return Text("[") + bar + Text("]")


def _legend() -> Text:
    text = Text("memory: ", style="dim")
    for name, sign, colour, _ in GROUPS:
        text.append(f"{sign}{sign} {name}  ", style=colour)
    return text


def _sections(answer: Answer) -> list[tuple[str, list[str]]]:
    from weft.plan.why import smallest_changes, what_would_change, why_best

    best = answer.plans[0]
    sections = [("why", why_best(answer).split("; "))]
    if lines := offload_lines(best.offload, host_memory_bytes=answer.request.cluster.host_memory_bytes):
        sections.append(("host and disk", lines))
    if not best.fits:
        sections.append(("nothing fits; it would fit with", smallest_changes(answer)))
    elif len(answer.plans) > 1:
        sections.append(("the best plan would be", what_would_change(answer)))
    if why_not_trained(best):
        sections.append(
            ("this version of weft plans this layout and does not train it yet", [_trained_instead(answer)])
        )
    plans = "plan" if answer.considered == 1 else "plans"
    counts = f"{answer.considered:,} {plans} considered, {answer.estimated:,} legal, {answer.num_fitting:,} fit"
    rejected = [
        f"{count:,} rejected: {reason}" for reason, count in sorted(answer.rejected.items(), key=lambda i: -i[1])
    ]
    sections.append((f"{counts}, {answer.elapsed_s:.2f} s", rejected))
    return sections


def offload_lines(offload: OffloadRecord, *, host_memory_bytes: int) -> list[str]:
    """Host memory, files, wear and copies of a plan with offload; nothing for others."""
    lines = []
    if offload.host_terms:
        lines.append(
            f"host memory: {format_bytes(sum(offload.host_terms.values()))} per rank ({_listed(offload.host_terms)}), "
            f"{format_bytes(offload.host_bytes_per_node)} of {format_bytes(host_memory_bytes)} per node"
        )
    if offload.disk_terms:
        lines.append(
            f"files: {format_bytes(sum(offload.disk_terms.values()))} per rank ({_listed(offload.disk_terms)})"
        )
        step, day = offload.file_bytes * offload.ranks_per_node, offload.written_bytes_per_day
        lines.append(f"wear: {format_bytes(step)} written per step and node, {format_bytes(day)} per day of training")
    place = f" on the {offload.update}" if offload.update else ""
    for row in offload.transfers:
        where = f"update{place}" if row["phase"] == "update" else row["phase"]
        lines.append(
            f"{where}: {format_bytes(row['in_bytes'])} to the device, {format_bytes(row['out_bytes'])} back, "
            f"{format_seconds(row['seconds'])}, {format_seconds(row['exposed_s'])} not hidden"
        )
    return lines


def _listed(terms: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())


def _trained_instead(answer: Answer) -> str:
    found = best_trained(answer)
    if found is None or not found.fits:
        return f"{why_not_trained(answer.plans[0])}; no plan that it trains fits"
    slower = found.step_s / answer.plans[0].step_s - 1
    return f"the best that it trains: {describe(found.plan)} ({slower:+.0%} step time)"


def _show_memory(console: Console, answer: Answer, best: Estimate) -> None:
    from weft.plan.arithmetic import explain_memory, textbook_activations, textbook_states

    shards = max(1, best.plan.mesh.dp_shard * best.plan.mesh.dp_replicate)
    table = textbook_states(answer.request, shards=shards)
    console.print(f"\n[bold]model states as textbooks count them, over {shards} devices[/bold]")
    rows = [(stage, formula, f"{size / 1e9:,.2f} GB") for stage, formula, size in table.rows()]
    _print_rows(console, ("stage", "parameters x bytes", "per device"), rows)
    mesh, workload = best.plan.mesh, answer.request.workload
    tokens = workload.tokens / (mesh.dp_degree * best.plan.pipeline.microbatches * mesh.cp)
    full, checkpointed = textbook_activations(answer.request, tokens=tokens)
    console.print(
        f"activations of one micro-batch, 12 x hidden x tokens x layers: {full / 1e9:,.1f} GB, "
        f"{checkpointed / 1e9:,.1f} GB with checkpointing; the activations that this model's operators save follow"
    )
    found, lines = explain_memory(answer.request, best.plan)
    console.print(f"\n[bold]this plan, at its peak: {found.peak_at}[/bold]")
    parts = [(str(line.term), line.formula, format_bytes(line.bytes)) for line in lines]
    _print_rows(console, ("term", "arithmetic", "bytes"), [*parts, ("total", "", format_bytes(found.memory_bytes))])


def _show_work(console: Console, answer: Answer, best: Estimate) -> None:
    """Attention of each context-parallel rank, for both splits."""
    from weft.plan.cp.work import work_by_split

    work = work_by_split(best.plan, answer.request.shape, answer.request.workload.sequence_length)
    if not work:
        return
    used = best.plan.context_parallel.split
    console.print("\n[bold]attention pairs of each context-parallel rank, over their mean[/bold]")
    names = [f"{split}{' (this plan)' if split == used else ''}" for split in work]
    rows = [
        (str(rank), *(f"{'█' * round(10 * each)} {each:.3f}" for each in shares))
        for rank, shares in enumerate(zip(*work.values(), strict=True))
    ]
    _print_rows(console, ("rank", *names), rows)


def _show_precision(console: Console, answer: Answer, best: Estimate) -> None:
    from weft.plan.formats import explain_precision, preset_as_dict

    preset = preset_as_dict(best.plan)
    console.print(f"\n[bold]preset {preset['name']}[/bold]: {preset['source']}")
    if preset["untold"]:
        console.print(f"not in the source, or other here: {preset['untold']}")
    found = explain_precision(answer.request, best.plan)
    rows = [
        (row.component, row.format, row.why, f"{row.bytes_per_parameter:g}" if row.bytes_per_parameter else "")
        for row in found
    ]
    total = ("at rest", "", "", f"{sum(row.bytes_per_parameter for row in found if row.is_at_rest):g}")
    _print_rows(console, ("component", "format", "from", "bytes per parameter"), [*rows, total])


def _print_rows(console: Console, heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)
