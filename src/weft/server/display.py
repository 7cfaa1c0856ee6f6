"""What a person sees of a run on parameter servers: a progress bar on a terminal, plain lines elsewhere; on stderr."""

from __future__ import annotations

from typing import Any

from weft.core.units import format_bytes, format_count, format_seconds
from weft.server.step_record import ServerStepRecord
from weft.train.progressing import Progressing


class ServerDisplay(Progressing):
    def step(self, record: ServerStepRecord) -> None:
        self.advance(record.step, step_figures(record), step_s=record.step_s)

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        told = "  ".join(f"{name} {figures[name]:.4f}" for name in ("auc", "loss") if name in figures)
        if told:
            self.line(f"step {step}: held-out {told}")

    def summary(self, ledger: dict[str, Any]) -> None:
        run = ledger["run"]
        loss = (
            f"loss {run['first_loss']:.3f} -> {run['final_loss']:.3f}" if run["final_loss"] is not None else "no step"
        )
        held = f", held-out auc {run['auc']:.4f}" if run["auc"] is not None else ""
        self.line(
            f"{run['status']} at step {run['steps']}: {loss}{held}; {format_count(run['samples_per_s'])} samples/s,"
            f" {format_count(ledger['rows'])} rows in {format_bytes(ledger['bytes'])},"
            f" {format_seconds(run['elapsed_s'])}"
        )


def step_figures(record: ServerStepRecord) -> str:
    stale = f"  staleness {record.staleness_mean:.1f}" if record.staleness_mean else ""
    return f"loss {record.loss:.4f}  {format_count(record.samples_per_s)} samples/s{stale}"
