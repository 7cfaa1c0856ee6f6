"""What a plan really computes, gathered to whole tensors. It runs the engine as training does; it judges nothing.

Every function here is collective: all ranks call it, rank 0 keeps the tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weft.comm.observer import CollectiveObserver
from weft.core.records import DtypeRecord, ParameterRecord
from weft.engine.engine import Engine
from weft.engine.objective import Batch
from weft.engine.ownership import local_index
from weft.engine.state import MODEL, OPTIMIZER
from weft.verify.eight_bit import decode_moments
from weft.verify.reference import Course, Tensors


@dataclass(kw_only=True)
class Evidence(Course):
    """A course with what only a plan has: its rows, dtypes, collectives, coverage and who owns which rows."""

    batches: list[Tensors] = field(default_factory=list)  # the global batch of every step, as the ranks held it
    dtypes: list[DtypeRecord] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    coverage: list[ParameterRecord] = field(default_factory=list)
    units: int = 0
    owners: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # rows of dim 0 by rank
    digests: dict[str, list[int]] = field(default_factory=dict)  # of every whole tensor at the end, by rank


def collect(engine: Engine, batches: Sequence[Batch], rates: Sequence[float], evaluation: Sequence[Batch]) -> Evidence:
    """Train over this rank's batches and gather everything the checks look at."""
    evidence = Evidence(
        batches=_whole_batches(batches, device=engine.device),
        initial={name: whole(parameter) for name, parameter in engine.model.named_parameters()},
        coverage=engine.coverage(),
        units=len(engine.layout.units),
        owners=_owners(engine),
    )

    def keep(gradients: Mapping[str, torch.Tensor]) -> None:
        if not evidence.first_gradients:
            evidence.first_gradients = {name: whole(gradient) for name, gradient in gradients.items()}

    engine.on_gradients = keep
    last = len(batches) - 1
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        if step == last:  # by then DDP has rebuilt its buckets
            engine.on_gradients = None
            with CollectiveObserver() as seen:
                record = engine.step(batch, learning_rate=rate)
            evidence.collectives = {name: count for name, count in seen.counts.items() if "small" not in name}
        else:
            record = engine.step(batch, learning_rate=rate)
        evidence.losses.append(record.loss)
        evidence.norms.append(record.grad_norm)
        if step == 0:
            evidence.first_weights = {name: whole(value) for name, value in engine.model.named_parameters()}
        if step in (0, last):  # after the first: what an evaluation leaves behind must not change the steps that follow
            evidence.eval_losses.append(engine.evaluate(evaluation).loss)
    engine.on_gradients = None
    evidence.dtypes = engine.dtypes()
    state = {key: whole(value) for key, value in engine.state().items()}
    evidence.weights = _part(state, MODEL)
    evidence.optimizer = decode_moments(_part(state, OPTIMIZER))
    evidence.digests = _digests(state, device=engine.device)
    return evidence


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global tensor on the host, as a copy that later steps do not change."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True)


def _part(state: Tensors, prefix: str) -> Tensors:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _whole_batches(batches: Sequence[Batch], *, device: torch.device) -> list[Tensors]:
    """Every rank's rows of every step, one after the other by rank."""
    gathered = {}
    for key in batches[0]:
        mine = torch.stack([batch[key] for batch in batches]).to(device)
        gathered[key] = torch.cat(_gather(mine), dim=1).cpu()
    return [{key: values[step] for key, values in gathered.items()} for step in range(len(batches))]


def _owners(engine: Engine) -> dict[str, list[tuple[int, int]]]:
    """Rows of dim 0 that each rank holds, for every sharded parameter."""
    mine: list[tuple[int, int]] = []
    names = []
    for name, parameter in engine.model.named_parameters():
        if isinstance(parameter, DTensor):
            rows = local_index(parameter)[0]
            names.append(name)
            mine.append((rows.start, rows.stop))
    if not names:
        return {}
    tables = _gather(torch.tensor(mine, dtype=torch.int64, device=engine.device))
    return {
        name: [(int(other[index, 0]), int(other[index, 1])) for other in tables] for index, name in enumerate(names)
    }


def _digests(state: Tensors, *, device: torch.device) -> dict[str, list[int]]:
    """What each rank believes the whole tensors to be, in 62 bits each."""
    mine = torch.tensor([_digest(state[key]) for key in sorted(state)], dtype=torch.int64, device=device)
    tables = _gather(mine)
    return {key: [int(table[index]) for table in tables] for index, key in enumerate(sorted(state))}


def _digest(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 2


def _gather(mine: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return parts
