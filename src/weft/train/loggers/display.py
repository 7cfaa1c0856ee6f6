"""Terminal output of a training: a progress bar on a terminal, plain lines elsewhere, a summary at the end.

Everything goes to stderr: stdout is for data. Only rank 0 prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.core.agreement import GUESSED_TIMES, has_guessed_times
from weft.core.records import DtypeRecord, EvalRecord, StepRecord, TextSample
from weft.core.units import format_bytes, format_count, format_seconds
from weft.data.preview import Preview
from weft.train.ledger.table import accuracy_table, cost_table
from weft.train.loggers.step_progress import StepProgress

MOST_LINES = 8  # on layers that fall back in one step
PROMPT_CHARACTERS, TEXT_CHARACTERS = 40, 160  # of a sampled text


class Display(StepProgress):
    """Output of rank 0; other ranks print nothing."""

    def step(self, record: StepRecord) -> None:
        self.advance(record.step, step_figures(record), step_s=record.step_s)
        self.fallback(record)

    def fallback(self, record: StepRecord) -> None:
        """Name the layers that compute unquantised from the next step on."""
        fallen, found = record.float8_fallback or (), record.float8_layers or {}
        for name in fallen[:MOST_LINES]:
            operand, figures = max(found[name].items(), key=lambda item: item[1][0])
            self.line(
                f"float8: {name} computes unquantised from step {record.step + 1} on: error {figures[0]:.1%} of its "
                f"{operand}, {figures[2]:.1%} of it become 0"
            )
        if len(fallen) > MOST_LINES:
            self.line(f"float8: so do {len(fallen) - MOST_LINES} more layers, see metrics.jsonl")

    def texts(self, samples: Sequence[TextSample]) -> None:
        """Print what the model wrote, on one line each."""
        for one in samples:
            prompt, written = _on_one_line(one.prompt, PROMPT_CHARACTERS), _on_one_line(one.text, TEXT_CHARACTERS)
            self.line(f"sample of step {one.step}: {prompt} -> {written}")

    def data(self, preview: Preview) -> None:
        """Print the counts and one row: colours show the tokens with a loss, brackets where there are none."""
        for line in preview.lines:
            self.line(f"data: {line}")
        self.line(
            "data: one row; [[what counts]]:"
            if not self.console.is_terminal
            else "data: one row; what counts is green:"
        )
        if not self.console.is_terminal:
            self.line(preview.plain())
            return
        row = Text()
        for text, counts in preview.row:
            row.append(text, style="bold green" if counts else "dim")
        self.console.print(row)

    def dtypes(self, records: list[DtypeRecord]) -> None:
        table = Table(title="dtypes found after step 1", title_justify="left")
        for heading in ("component", "asked", "found", ""):
            table.add_column(heading)
        for record in records:
            table.add_row(
                record.component,
                record.asked,
                ", ".join(record.found),
                (record.note or "ok") if record.ok else "DIFFERS",
            )
        self.console.print(table)

    def summary(self, ledger: dict[str, Any]) -> None:
        run, memory = ledger["run"], ledger["memory"]
        loss = (
            f"loss {run['first_loss']:.3f} -> {run['final_loss']:.3f}" if run["final_loss"] is not None else "no step"
        )
        if run["eval_loss"] is not None:
            loss += f", held-out {run['eval_loss']:.3f}"
        for name, found in (run.get("evaluations") or {}).items():
            loss += f", {name} {found['loss']:.3f}" if found["loss"] is not None else ""
        rate = f"{format_count(run['tokens_per_s'])} tokens/s" if run["tokens_per_s"] else ""
        self.line(
            f"{run['status']} at step {run['steps']}: {loss}; {rate}, peak {format_bytes(memory['peak_bytes'])} per"
            f" rank, {format_seconds(run['elapsed_s'])}"
        )
        if run.get("no_evaluation"):
            self.line(f"warning: {run['no_evaluation']}")
        techniques = ledger.get("fast_path", [])
        if any(row["on"] for row in techniques if row["technique"] == "compiled blocks"):
            self.line("fast path: " + techniques_phrase(techniques))

    def float8(self, found: dict[str, Any] | None) -> None:
        """Print the layers with the largest quantisation errors, if they were measured."""
        if not found or not found["worst"]:
            return
        self.console.print(accuracy_table(found))
        if found["unquantised"]:
            self.line(f"float8: {len(found['unquantised'])} layers fell back to unquantised products")

    def pipeline(self, figures: dict[str, Any]) -> None:
        """Print one line: the share of idle time of the pipeline's ranks."""
        bubble = figures["bubble_share"]
        shares = f"bubble {bubble['measured']:.1%} of step {figures['step']}, {bubble['simulated']:.1%} simulated"
        self.line(f"pipeline {figures['schedule']}, {figures['microbatches']} micro-batches: {shares} with its costs")

    def costs(self, ledger: dict[str, Any]) -> None:
        """Print the cost table, and notes on empty columns."""
        self.console.print(cost_table(ledger))
        guessed = [GUESSED_TIMES] if has_guessed_times(ledger) else []
        for remark in [*guessed, *ledger.get("remarks", [])]:
            self.line(f"note: {remark}")


def evaluation_line(step: int, found: Mapping[str, EvalRecord]) -> str:
    sets = (f"{name} loss {one.loss:.4f}, perplexity {one.perplexity:.4g}" for name, one in found.items())
    return f"evaluation at step {step}: {'; '.join(sets)}"


def techniques_phrase(rows: list[dict[str, Any]]) -> str:
    """The techniques in use, and the others with their reasons."""
    on = ", ".join(row["technique"] for row in rows if row["on"])
    off = "; ".join(f"no {row['technique']} ({row['why']})" for row in rows if not row["on"])
    return f"{on}; {off}" if off else on


def step_figures(record: StepRecord) -> str:
    loss = f"loss {record.loss:.4f}" + (f" (held-out {record.eval_loss:.4f})" if record.eval_loss is not None else "")
    speed = f"{format_count(record.tokens_per_s)} tokens/s"
    skipped = f"  skipped: {record.bad_step or 'overflow'}" if record.skipped else ""
    load = f"  expert load {record.expert_load:.2f}x" if record.expert_load is not None else ""
    load += f", {record.dropped_share:.1%} dropped" if record.dropped_share is not None else ""
    load += "".join(f"  {name.replace('_', ' ')} {value:.3g}" for name, value in shown_figures(record).items())
    return f"{loss}  norm {record.grad_norm:.3f}{load}  {speed}  {format_bytes(record.peak_memory_bytes)}{skipped}"


def _on_one_line(written: str, most: int) -> str:
    line = " ".join(written.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def shown_figures(record: StepRecord) -> dict[str, float]:
    """The objective's figures that fit into a line: the last two, for pairs margin and accuracy."""
    return dict(list((record.figures or {}).items())[-2:])
