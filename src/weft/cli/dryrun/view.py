"""The terminal output of `weft dryrun`: memory by term, the peak and its largest holder, the verdict; progress bars."""

from __future__ import annotations

import sys
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from weft.core.terms import MemoryTerm as Term
from weft.core.units import format_bytes, format_count, format_seconds
from weft.plan.changes import format_keys
from weft.plan.words import describe

if TYPE_CHECKING:
    from weft.cli.dryrun.question import DryRunAnswer
    from weft.core.records import HolderRecord, PeakRecord
    from weft.dryrun.fit import Fit
    from weft.plan.changes import Change

BAR_WIDTH = 28
NAMES = {
    Term.WEIGHTS: "the weights at rest",
    Term.GRADIENTS: "gradients",
    Term.OPTIMIZER_STATE: "the optimizer's states",
    Term.GATHERED: "gathered weights",
    Term.COMM_BUFFERS: "buffers of collectives",
    Term.ACTIVATIONS: "activations",
    Term.LOGITS: "logits and their gradients",
    Term.TEMPORARIES: "temporaries",
}
# The effect of a change, by its first key.
DOES = {
    "pipeline.microbatches": "smaller micro-batches",
    "activations.policy": "recomputing activations",
    "activations.mixture": "recomputing more blocks",
    "data_parallel.zero": "sharding more",
    "mesh.dp_replicate": "sharding over all ranks",
    "train.optimizer": "8-bit optimizer states",
    "precision.preset": "16-bit numbers",
    "offload.optimizer": "the optimizer on the host",
}


class ProgressBar:
    """A progress bar on a terminal, one line elsewhere; removed when the work is done."""

    def __init__(self, title: str, *, total: int) -> None:
        self._console = Console(file=sys.stderr)
        self._title = title
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bars.add_task(title, total=total)

    def __enter__(self) -> ProgressBar:
        if not self._console.is_terminal:
            print(self._title, file=sys.stderr)
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def advance(self, place: int, outcome: object) -> None:
        self._bars.advance(self._task)


def show(answer: DryRunAnswer) -> None:
    """Print the answer on stdout."""
    console = Console(highlight=False, soft_wrap=True)
    for line in lines_of(answer):
        console.print(line, markup=False)


def lines_of(answer: DryRunAnswer) -> list[str]:
    found, peak = answer.found, answer.found.peak
    return [
        f"{describe(answer.question.plan)}: rank {found.rank} of {found.world_size:,}, "
        f"{format_count(found.num_parameters)} parameters, {answer.question.plan.precision.preset}",
        *_bars(answer),
        f"the peak is in the {peak.phase}, {_moment(peak)} ({peak.operator})",
        *_culprit_lines(answer),
        *_reserved(answer),
        *_moments(answer),
        *_offloaded(answer),
        *_other_ranks(answer),
        *_traffic(answer),
        f"computes {_flops_text(found.flops)} per step",
        *(f"note: {note}" for note in found.notes),
        *(_verdict(answer.fit, answer.changes) if answer.fit is not None else []),
        f"{format_seconds(found.elapsed_s)}, nothing was allocated",
    ]


def _flops_text(flops: int) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12)):
        if flops >= size:
            return f"{flops / size:.2f} {unit}"
    return f"{flops / 1e9:.2f} GFLOP"


def culprit(peak: PeakRecord) -> dict[str, Any]:
    """The largest term at the peak: its name, its bytes, and a sentence that names the module that allocated it."""
    term, nbytes = max(peak.terms.items(), key=lambda item: item[1])
    mine = [holder for holder in peak.largest if holder.term == term]
    text = f"{NAMES.get(Term(term), term)}: {format_bytes(nbytes)}{_allocated_by(term, mine, nbytes)}"
    return {"term": term, "bytes": nbytes, "text": text}


def _allocated_by(term: str, holders: list[HolderRecord], total_bytes: int) -> str:
    if not holders or term in (Term.WEIGHTS, Term.OPTIMIZER_STATE, Term.GRADIENTS):
        return ""
    if term == Term.LOGITS:
        phases = Counter(holder.phase for holder in holders)
        return f", made in the {' and the '.join(sorted(phases, reverse=True))} of the loss"
    places: Counter[str] = Counter()
    for holder in holders:
        places[_part(holder.module)] += holder.nbytes
    place, nbytes = places.most_common(1)[0]
    share = "all of it" if nbytes > 0.99 * total_bytes else f"at least {format_bytes(nbytes)} of it"
    return f", {share} from {_place(place)}"


def _part(module: str) -> str:
    """model.layers.*.mlp.up_proj -> model.layers.*.mlp."""
    block, star, rest = module.partition(".*.")
    return f"{block}{star}{rest.partition('.')[0]}" if star else module


def _moment(peak: PeakRecord) -> str:
    is_loss = not peak.module and any(word in peak.operator for word in ("softmax", "nll_loss", "cross_entropy"))
    return "at the loss" if is_loss else _place(peak.module)


def _place(module: str) -> str:
    return module or "outside the blocks"


def _bars(answer: DryRunAnswer) -> list[str]:
    found = answer.found
    predicted = answer.predicted.memory_terms if answer.predicted else {}
    rows = [(term, nbytes, predicted.get(term, 0)) for term, nbytes in found.terms.items()]
    rows += [(term, 0, guess) for term, guess in predicted.items() if guess and not _is_listed(term, found.terms)]
    width = max(len(term) for term, _, _ in rows)
    head = f"  {'':{width}}  {'dry run':>10}  {'':{BAR_WIDTH}}  {'weft plan':>10}"
    lines = [
        f"  {term:{width}}  {format_bytes(nbytes):>10}  {_bar(nbytes, found.peak_bytes)}  "
        f"{format_bytes(guess) if predicted else '':>10}"
        for term, nbytes, guess in rows
    ]
    total = sum(guess for term, guess in predicted.items() if term != Term.FRAMEWORK)
    last = f"  {'peak':{width}}  {format_bytes(found.peak_bytes):>10}  {'':{BAR_WIDTH}}  "
    return [head if predicted else "", *lines, last + (f"{format_bytes(total):>10}" if predicted else "")]


def _is_listed(term: str, terms: dict[str, int]) -> bool:
    return term in terms or term == Term.FRAMEWORK  # which is outside the peak


def _bar(nbytes: int, total_bytes: int) -> str:
    return f"{'█' * round(BAR_WIDTH * nbytes / max(total_bytes, 1)):{BAR_WIDTH}}"


def _culprit_lines(answer: DryRunAnswer) -> list[str]:
    lines = [culprit(answer.found.peak)["text"]]
    saving = answer.saving
    if saving is not None:
        does = DOES.get(next(iter(saving.keys)), "that")
        lines.append(f"{does} ({format_keys(saving.keys)}) would save about {format_bytes(saving.saves_bytes)}")
    return lines


def _reserved(answer: DryRunAnswer) -> list[str]:
    from weft.dryrun.fit import EXPANDABLE, FIXED

    reserved = answer.found.reserved_bytes
    if not reserved:
        return []
    idle = 1 - answer.found.peak_bytes / reserved[EXPANDABLE]
    return [
        f"the allocator reserves {format_bytes(reserved[EXPANDABLE])} with expandable segments "
        f"({idle:.0%} of it idle at the peak), {format_bytes(reserved[FIXED])} without"
    ]


def _offloaded(answer: DryRunAnswer) -> list[str]:
    places = {"host memory": answer.found.host_terms, "files": answer.found.file_terms}
    return [
        f"{title}: {', '.join(f'{name} {format_bytes(size)}' for name, size in terms.items())}"
        for title, terms in places.items()
        if terms
    ]


def _moments(answer: DryRunAnswer) -> list[str]:
    from weft.dryrun.fit import device_moments

    peaks = [f"{name} {format_bytes(nbytes)}" for name, nbytes in device_moments(answer.found).items() if nbytes]
    return [f"other moments: {', '.join(peaks)}"] if peaks else []


def _other_ranks(answer: DryRunAnswer) -> list[str]:
    return [f"rank {one.rank} has its peak at {format_bytes(one.peak_bytes)}" for one in answer.others]


def _traffic(answer: DryRunAnswer) -> list[str]:
    return [
        f"sends {format_bytes(row['bytes'])} on {row['axis']}: {row['count']:,} x {row['collective']}, {row['phase']}"
        for row in answer.found.traffic
    ]


def _verdict(fit: Fit, changes: list[Change]) -> list[str]:
    if fit.is_tight:
        return [
            f"fits on {fit.device}, tightly: the allocator would keep {format_bytes(fit.wanted_bytes)}, "
            f"so it frees and reallocates memory in every step, which is slow"
        ]
    if fit.fits:
        return [f"fits on {fit.device}: {format_bytes(fit.capacity_bytes - fit.wanted_bytes)} to spare"]
    lines = [f"does not fit on {fit.device}: {format_bytes(-fit.free_bytes)} too much"]
    if not changes:
        return [*lines, "no change of one or two keys makes it fit: weft plan searches every layout"]
    return [*lines, "it would fit with, by weft plan's estimate:", *(f"  {change.text}" for change in changes)]
