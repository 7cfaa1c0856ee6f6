"""What is to be verified, as every rank is told it; and every plan of a world size. JSON in and out, no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class Request:
    run: RunSpec
    plans: list[dict[str, Any]]
    steps: int = 5
    as_is: bool = False
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    answer: str | None = None  # the file rank 0 writes its verdicts to

    def to_json(self) -> str:
        fields = {**vars(self), "run": self.run.model_dump(mode="json", exclude_none=True)}
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> Request:
        fields = json.loads(text)
        return Request(**{**fields, "run": RunSpec.from_tables(fields["run"])})


def data_parallel_plans(num_ranks: int, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Every legal data-parallel plan of `num_ranks`: DDP, ZeRO-1/2/3 over all, and HSDP over every proper divisor."""
    layouts: list[dict[str, Any]] = [{"mesh": {"dp_replicate": num_ranks}, "data_parallel": {"zero": 0}}]
    for shard in (size for size in range(1, num_ranks + 1) if num_ranks % size == 0):
        if shard == 1 and num_ranks > 1:
            continue
        layouts += [
            {"mesh": {"dp_replicate": num_ranks // shard, "dp_shard": shard}, "data_parallel": {"zero": zero}}
            for zero in (1, 2, 3)
        ]
    kept = {key: value for key, value in base.items() if key not in ("mesh", "data_parallel")}
    return [Plan.from_tables({**kept, **layout}).model_dump(mode="json", exclude_none=True) for layout in layouts]
