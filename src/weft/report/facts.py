"""The figures that every run has, for the head of its page. None means "not known", never zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.core.units import format_count
from weft.report.fields import count, number, table, word
from weft.report.folder import RunRecords


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Trainings and runs on servers add their own."""

    model: str
    status: str  # finished | done | stopped | failed | unknown
    steps_done: int
    steps_asked: int | None
    first_loss: float | None
    final_loss: float | None
    eval_loss: float | None
    elapsed_s: float | None

    @property
    def steps_phrase(self) -> str:
        """'200 steps', or '120 of 200 steps' where the run did not reach its end."""
        if self.steps_asked is None or self.steps_asked == self.steps_done:
            return counted(self.steps_done, "step")
        return f"{self.steps_done:,} of {self.steps_asked:,} steps"

    @property
    def steps_note(self) -> str:
        return f"of {self.steps_asked:,} asked" if self.steps_asked is not None else ""


def common_facts(folder: RunRecords[Any]) -> dict[str, Any]:
    """The fields of `Facts` that are read alike from every folder."""
    run, steps = table(folder.ledger, "run"), folder.metrics.steps
    return {
        "status": word(run.get("status")) or "unknown",
        "steps_done": steps[-1].step if steps else 0,
        "steps_asked": count(table(folder.run, "train").get("steps")),
        "final_loss": number(steps[-1].loss) if steps else None,
        "elapsed_s": number(run.get("elapsed_s")),
    }


def model_name(*values: Any) -> str:
    return next((value for value in values if word(value)), "a model of unknown name")


def counted(num: int, noun: str) -> str:
    """1 -> '1 step', 1200 -> '1,200 steps'."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def one_line(*parts: str | None) -> str:
    """The known parts of a run's verdict, in one line."""
    return " · ".join(part for part in parts if part)


def phrase(value: float | None, words: str) -> str:
    """`words` with the value filled in ("loss {:.4g}", "{count} tokens/s"); empty where it is not known."""
    return "" if value is None else words.format(value, count=format_count(value))
