"""One rank of `weft generate --nproc`: join, load its shards, sample; rank 0 writes the answer of all.

launcher: job.json -> `python -m weft.generate job.json` per rank -> answer.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from weft.generate.sample import Generated, Sampling, sample
from weft.generate.sharded import load_sharded
from weft.train.ranks.process import join, leave, phase


@dataclass(frozen=True, kw_only=True)
class GenerateJob:
    """What every rank reads."""

    folder: str
    prompts: list[str]
    num_ranks: int
    dtype: str
    answer: str
    device: Literal["cpu", "cuda"] = "cpu"
    sampling: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GenerateJob:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class RankedText:
    """What the ranks generated together, as rank 0 saw it, and the bytes of each rank."""

    made: Generated
    config: dict[str, Any]
    weight_bytes: list[int]
    cache_bytes: list[int]

    @classmethod
    def read(cls, path: Path) -> RankedText:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "made": Generated(**fields["made"])})


def generate_here(job: GenerateJob) -> None:
    """Run one rank."""
    process = join(device_type=job.device)
    try:
        device = torch.device(job.device, process.local_rank) if job.device == "cuda" else torch.device("cpu")
        with phase("loading", is_slow=True):
            loaded = load_sharded(
                Path(job.folder), degree=job.num_ranks, dtype=getattr(torch, job.dtype), device=device
            )
        with phase("generating", is_slow=True):
            made = sample(loaded, job.prompts, Sampling(**job.sampling))
        sizes: list[tuple[int, int]] = [(0, 0)] * job.num_ranks
        dist.all_gather_object(sizes, (made.weight_bytes, made.cache_bytes))
        if process.is_main:
            config = loaded.model.config.to_dict()
            weights, caches = [one for one, _ in sizes], [one for _, one in sizes]
            answer = RankedText(made=made, config=config, weight_bytes=weights, cache_bytes=caches)
            Path(job.answer).write_text(json.dumps(asdict(answer), default=str), encoding="utf-8")
    finally:
        leave()
