"""Evidence: the values that a plan computes, gathered to full tensors. Runs the engine as training does; no judgement.

Every function here is collective: all ranks call it, rank 0 keeps the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weft.checkpoint.parts import OF_ONE_RANK, ShardTensor
from weft.core import axes
from weft.core.records import DtypeRecord, ParameterRecord, StepRecord
from weft.core.shards import Chunk
from weft.engine.engine import Engine
from weft.engine.measure.meter import StepMeter
from weft.engine.objective import Batch
from weft.engine.optim.adamw_low import AdamWLow
from weft.engine.optim.schedule_free import ScheduleFreeAdamW
from weft.engine.ownership import chunks_of
from weft.engine.state import MODEL, OPTIMIZER, as_shard, base_tensors
from weft.verify.checks import Block
from weft.verify.coded_sums import GATHERS, SUMS, SumEvidence, SumWatch
from weft.verify.eight_bit import decode_moments
from weft.verify.float8_check import differing_histories, wrong_products
from weft.verify.forward_weights import Seen, WeightWatch, digest
from weft.verify.low_update import LowPrecisionStep
from weft.verify.run_trace import RunTrace, Tensors

WATCHED_STEPS = 2  # whose forwards are watched: the second has weights that an update made
LOW_UPDATES = 2  # recorded updates of an optimizer that rounds: the first has no moments before it


@dataclass(kw_only=True)
class Evidence(RunTrace):
    """A run trace with the plan's own facts: rows, dtypes, traffic, coverage and the owner of each row."""

    batches: list[Tensors] = field(default_factory=list)  # the global batch of every step, as the ranks held it
    dtypes: list[DtypeRecord] = field(default_factory=list)
    traffic: list[dict[str, Any]] = field(default_factory=list)  # of this rank in the last step
    coverage: list[ParameterRecord] = field(default_factory=list)
    owners: dict[str, list[Block]] = field(default_factory=dict)  # by rank
    digests: dict[str, list[int]] = field(default_factory=dict)  # of every full tensor at the end, by rank
    buffer_digests: dict[str, list[int]] = field(default_factory=dict)  # of buffers that forwards change, by rank
    loads: list[Tensors] = field(default_factory=list)  # by step and module of experts: choices of each expert
    wrong_products: list[str] = field(default_factory=list)  # in float8, on any rank
    updates: list[LowPrecisionStep] = field(default_factory=list)  # the first ones, if the optimizer rounds
    exact_gradients: Tensors = field(default_factory=dict)  # the first ones, of a run without that rounding
    coded: tuple[SumEvidence, ...] = ()  # sums and gathers of the first steps that travel as codes
    forward_weights: list[list[Seen]] = field(default_factory=list)  # of the first steps, by step and rank


def collect(engine: Engine, batches: Sequence[Batch], rates: Sequence[float], evaluation: Sequence[Batch]) -> Evidence:
    """Train on this rank's batches and gather everything that the checks read."""
    evidence = Evidence(
        batches=_global_batches(batches, engine),
        initial=_full_weights(engine),
        coverage=_coverage(engine),
        owners=_owners(engine),
    )

    def keep(gradients: Mapping[str, torch.Tensor]) -> None:
        is_kept = _rounds(engine) and len(evidence.updates) < LOW_UPDATES
        if not evidence.first_gradients or is_kept:
            full_gradients = _full_tensors(engine, gradients)
            evidence.first_gradients = evidence.first_gradients or full_gradients
            evidence.updates += [LowPrecisionStep(gradients=full_gradients)] if is_kept else []

    if any(engine.float8.values()):
        evidence.wrong_products = _of_all_ranks(wrong_products(engine))
    engine.on_gradients = keep
    last, sums, weights = len(batches) - 1, SumWatch(), WeightWatch(engine)
    num_watched = min(last, 2 if engine.plan.data_parallel.error_feedback else 1)  # a second step has errors to add
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        if step == last:  # DDP has rebuilt its buckets before it
            engine.on_gradients = None
            meter = StepMeter(engine)
            with meter.measuring(), weights.watching() if step < WATCHED_STEPS else nullcontext():
                meter.next_step()
                record = _step(engine, batch, rate, evidence)
            evidence.traffic = meter.traffic
        else:
            with (
                sums.watching() if step < num_watched else nullcontext(),
                weights.watching() if step < WATCHED_STEPS else nullcontext(),
            ):
                record = _step(engine, batch, rate, evidence)
            if step == num_watched - 1:
                evidence.coded = tuple(one for one in map(sums.judge, (SUMS, GATHERS)) if one.format)
        evidence.losses.append(record.loss)
        evidence.norms.append(record.grad_norm)
        if step < min(LOW_UPDATES, last) and _rounds(engine):
            _keep_update(evidence.updates[step], engine, record.grad_norm)
        if step == (1 if engine.plan.offload.delayed else 0):  # the update of the first step has landed
            engine.drain()
            evidence.first_weights = _full_weights(engine)
        if step in (0, last):  # after the first: state left by an evaluation must not change later steps
            with engine.average_weights(is_on=isinstance(engine.optimizer, ScheduleFreeAdamW)):
                evidence.eval_losses.append(engine.evaluate(evaluation).loss)
    engine.on_gradients = None
    evidence.forward_weights = weights.gather()
    evidence.wrong_products += differing_histories(engine)
    evidence.dtypes = engine.dtypes()
    state = _over_stages(engine, _full_state(engine))
    evidence.weights = _with_prefix(state, MODEL)
    evidence.optimizer = decode_moments(_with_prefix(state, OPTIMIZER))
    evidence.digests = _digests(state, device=engine.device)
    evidence.buffers = _over_stages(
        engine, {name: full_tensor(value) for name, value in engine.buffer_sync.values().items()}
    )
    evidence.buffer_digests = _owned_digests(engine)
    evidence.biases = {name: evidence.weights[name] for name in engine.routers.biases if name in evidence.weights}
    return evidence


def first_gradients(engine: Engine, batch: Batch) -> Tensors:
    """The gradients of one step."""
    found: Tensors = {}
    engine.on_gradients = lambda gradients: found.update(_full_tensors(engine, gradients))
    engine.step(batch)
    engine.on_gradients = None
    return found


def _of_all_ranks(own: list[str]) -> list[str]:
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    return [line for lines in found for line in lines]


def _step(engine: Engine, batch: Batch, rate: float, evidence: Evidence) -> StepRecord:
    """A step, whose loads of experts are kept."""
    pending = engine.step_nowait(batch, learning_rate=rate)
    record, _ = pending.resolve()
    if pending.router is not None:
        loads, routers = pending.router.choices(), engine.routers
        evidence.loads.append(loads)
        evidence.drops.append(pending.router.drops())
        biases = {} if record.skipped else routers.biases
        evidence.bias_loads.append({bias: loads[experts] for bias, experts in biases.items()})
    return record


def _rounds(engine: Engine) -> bool:
    return isinstance(engine.optimizer, AdamWLow) and engine.optimizer.rounds


def _keep_update(update: LowPrecisionStep, engine: Engine, norm: float) -> None:
    state = _over_stages(engine, _full_state(engine))
    update.norm, update.weights, update.states = norm, _with_prefix(state, MODEL), _with_prefix(state, OPTIMIZER)


def _full_state(engine: Engine) -> Tensors:
    """Without what only one rank continues from."""
    in_codes = {f"{MODEL}{name}": value for name, value in base_tensors(engine.model, engine.shards).items()}
    state = {**engine.state(), **in_codes}.items()
    return {key: full_tensor(value, engine) for key, value in state if not key.startswith(OF_ONE_RANK)}


def full_tensor(tensor: torch.Tensor, engine: Engine | None = None) -> torch.Tensor:
    """A copy of the global tensor on the host. Collective over the ranks that have it."""
    if isinstance(tensor, ShardTensor):
        return _assemble(tensor, engine.topology.stage_group if engine is not None else None)
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True)


def _full_weights(engine: Engine) -> Tensors:
    """Full masters, or parameters that are their own, of all stages, by name."""
    return _of_all_stages(engine, {**engine.weights(), **base_tensors(engine.model, engine.shards)})


def _full_tensors(engine: Engine, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Full gradients of all stages, by name."""
    shards = {name: as_shard(tensor.detach(), engine.shards.get(name)) for name, tensor in tensors.items()}
    return _of_all_stages(engine, shards)


def _of_all_stages(engine: Engine, shards: Mapping[str, torch.Tensor]) -> Tensors:
    found = {name: full_tensor(shard, engine) for name, shard in shards.items()}
    return _over_stages(engine, {name: value for name, value in found.items() if name not in engine.layout.copies})


def _over_stages(engine: Engine, mine: dict[str, Any]) -> dict[str, Any]:
    """Merge the dicts of all stages of this rank's pipeline."""
    topology = engine.topology
    if topology.pp_degree == 1:
        return mine
    held: list[Any] = [None] * topology.pp_degree
    dist.all_gather_object(held, mine, group=topology.group(axes.PP))
    return {name: value for of_stage in held for name, value in of_stage.items()}


def _coverage(engine: Engine) -> list[ParameterRecord]:
    rows = {row.name: row for row in engine.coverage() if row.name not in engine.layout.copies}
    return list(_over_stages(engine, rows).values())


def _assemble(shard: ShardTensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Assemble the full tensor from every rank's chunks; its own last, so that its digest shows a difference."""
    held: list[Any] = [None] * dist.get_world_size(group)
    own = (shard.chunks, shard.local.cpu())
    dist.all_gather_object(held, own, group=group)
    nothing = float("nan") if shard.dtype.is_floating_point else 0
    made = torch.full(shard.shape, nothing, dtype=shard.dtype)
    for chunks, memory in (*held, own):
        for chunk in chunks:
            made[chunk.global_index] = memory[chunk.local_index]
    return made


def _with_prefix(state: Tensors, prefix: str) -> Tensors:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _global_batches(batches: Sequence[Batch], engine: Engine) -> list[Tensors]:
    """The global batch of every step: the rows of all data-parallel ranks in rank order."""
    gathered = {}
    for key in batches[0]:
        mine = torch.stack([batch[key] for batch in batches]).to(engine.device)
        gathered[key] = torch.cat(_gather(mine, engine.topology.dp_group), dim=1).cpu()
    return [{key: values[step] for key, values in gathered.items()} for step in range(len(batches))]


def _owners(engine: Engine) -> dict[str, list[Block]]:
    """The block that each rank holds, for every parameter that is not replicated on all ranks."""
    mine: dict[str, Block] = {}
    for name, parameter in engine.model.named_parameters():
        shard = engine.shards.get(name)
        is_sharded = isinstance(parameter, DTensor) or (shard is not None and shard.is_sharded)
        if (is_sharded or engine.topology.pp_degree > 1) and name not in engine.layout.copies:
            mine[name] = _block(chunks_of(parameter, shard))
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    return {name: [of_rank.get(name, ()) for of_rank in held] for name in {key for one in held for key in one}}


def _block(chunks: Sequence[Chunk]) -> Block:
    """The smallest block around a rank's chunks; empty without chunks."""
    if not chunks:
        return ()
    ends = [tuple(start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in chunks]
    begins = map(min, zip(*(chunk.offsets for chunk in chunks), strict=True))
    return tuple(zip(begins, map(max, zip(*ends, strict=True)), strict=True))


def _digests(state: Tensors, *, device: torch.device) -> dict[str, list[int]]:
    """62-bit digests of the full tensors, by rank."""
    mine = torch.tensor([digest(state[key]) for key in sorted(state)], dtype=torch.int64, device=device)
    tables = _gather(mine)
    return {key: [int(table[index]) for table in tables] for index, key in enumerate(sorted(state))}


def _owned_digests(engine: Engine) -> dict[str, list[int]]:
    """Digests of the changed buffers, from each rank that has them."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        held, {name: digest(full_tensor(value)) for name, value in engine.buffer_sync.values().items()}
    )
    names = dict.fromkeys(name for of_rank in held for name in of_rank)
    return {name: [of_rank[name] for of_rank in held if name in of_rank] for name in names}


def _gather(mine: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    shards = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, mine, group=group)
    return shards
