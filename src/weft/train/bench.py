"""`weft bench step`: speed and memory of a step, measured on a single rank of any plan whose ranks do equal work.

A plan of many ranks is measured as its rank 0 with collectives replaced by local copies (`comm.loopback`): compute and
memory of a rank without a network, so an upper bound of speed. Tokens are random. A rank of context parallelism has a
part of each row: its tokens are counted, and its loss is its part of the mean. Steps are timed by device events
without synchronisation between them; peaks are of the timed steps; kernels are those of one more step.

    MFU = tokens/s x FLOP per token / peak FLOP/s of the device in the plan's compute dtype
    FLOP per token = 6 x weights that multiply it (head in, embedding out) + 12 x layers x heads x head_dim x sequence
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from weft import hardware
from weft.comm.loopback import loopback_world
from weft.core.errors import NotBuiltError
from weft.core.objective_rules import require_next_token
from weft.core.plan import Plan
from weft.core.records import TechniqueRecord
from weft.core.run_spec import RunSpec
from weft.engine.engine import Engine
from weft.engine.kernels.fast_path import fast_path
from weft.engine.measure.timer import now, seconds_between
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.adapter.build import run_skeleton
from weft.models.build import build_config
from weft.plan.legality import require_legal
from weft.plan.time.compute import model_flops
from weft.train.build import weight_source
from weft.train.kernel_classes import kernel_times
from weft.train.ledger.predicted import request_for

NUM_BATCHES = 4  # used in rotation
Step = Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One loop's figures. `steps_s` are the timed steps in order; peaks are 0 on a CPU."""

    name: str
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    steps_s: tuple[float, ...] = ()
    mfu: float | None = None
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    first_step_s: float = 0.0
    loss_first: float = 0.0
    loss_last: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)  # seconds of one step, by class
    largest_kernels: tuple[tuple[str, float], ...] = ()
    failed: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The measurement: a run under a plan on a device, `steps` timed steps after `warmup` untimed ones."""

    run: RunSpec
    plan: Plan
    device: torch.device
    steps: int = 10
    warmup: int = 3

    @property
    def rows(self) -> int:
        return self.run.train.global_batch // self.plan.mesh.dp_degree

    @property
    def tokens(self) -> int:
        """Of one rank."""
        return self.rows * self.run.data.sequence_length // self.plan.mesh.cp


def require_measurable(plan: Plan) -> None:
    """Require a plan of which one rank represents all."""
    if plan.mesh.tp * plan.mesh.pp > 1:
        raise NotBuiltError(
            "bench step measures one rank alone, but the ranks of this plan depend on each other:"
            f" mesh.tp = {plan.mesh.tp}, mesh.pp = {plan.mesh.pp}",
            hint="set mesh.tp and mesh.pp to 1, or train a few steps and read the ledger",
        )
    policy = plan.context_parallel
    if plan.mesh.cp > 1 and policy.split == "contiguous" and policy.attention != "ulysses":
        raise NotBuiltError(
            "bench step measures rank 0, which has the least attention of all with context_parallel.split ="
            " 'contiguous'",
            hint="set context_parallel.split = 'zigzag', which gives every rank the same work",
        )


def measure_engine(bench: Bench) -> tuple[Timed, list[TechniqueRecord], tuple[str, ...]]:
    """The figures of weft's own step, the state of each fast-path technique, and notes."""
    require_legal(bench.plan, bench.run)
    require_next_token(bench.run, "weft bench step")
    require_measurable(bench.plan)
    with _world(bench.plan.num_ranks), ExitStack() as stack:
        config = build_config(bench.run.model, vocab_size=1)
        engine = _engine(bench, config)
        stack.callback(engine.close)
        batches = _batches(bench, config)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return engine.step_nowait(batch).values[0]

        timed = _timed("weft", step, batches, bench, flops=_flops_per_token(bench, config))
        return timed, fast_path(engine), engine.notes


def measure_plain(bench: Bench) -> Timed:
    """A plain Hugging Face loop on one device: bf16 autocast, torch's own AdamW, clipping; the same rows."""
    if bench.plan.mesh.cp > 1:
        return Timed(name="plain HF", failed="has no context parallelism")
    config = build_config(bench.run.model, vocab_size=1)
    try:
        model = _plain_model(bench, config)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=bench.run.train.learning_rate, betas=bench.run.train.betas, weight_decay=0.1
        )
        is_low = bench.plan.precision.policy().is_low

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=is_low):
                loss: torch.Tensor = model(
                    input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False
                ).loss
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return _timed("plain HF", step, _batches(bench, config), bench, flops=_flops_per_token(bench, config))
    except torch.OutOfMemoryError:
        return Timed(name="plain HF", failed="does not fit on the device")
    finally:
        _free(bench.device)


@contextmanager
def _world(num_ranks: int) -> Iterator[None]:
    if num_ranks == 1:
        yield  # the engine makes its own group of one
        return
    with loopback_world(num_ranks=num_ranks):
        yield


def _engine(bench: Bench, config: Any) -> Engine:
    weights, _ = weight_source(bench.run, config, device=bench.device)
    return Engine(
        run_skeleton(bench.run, config),
        bench.plan,
        optimizer=OptimizerPolicy.of(bench.run.train),
        seed=bench.run.train.seed,
        clip_norm=bench.run.train.clip_norm,
        frozen=bench.run.train.frozen,
        router=bench.run.router,
        weights=weights,
        device=bench.device,
    )


def _plain_model(bench: Bench, config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device(bench.device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    return model.train()


def _batches(bench: Bench, config: Any) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator(device=bench.device).manual_seed(1)
    shape = (bench.rows, bench.run.data.sequence_length + 1)
    vocab_size = int(config.get_text_config().vocab_size)
    found = []
    for _ in range(NUM_BATCHES):
        tokens = torch.randint(0, vocab_size, shape, device=bench.device, generator=generator)
        found.append({"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
    return found


def _timed(
    name: str, step: Step, batches: list[dict[str, torch.Tensor]], bench: Bench, *, flops: tuple[float, float] | None
) -> Timed:
    """Warm-up, timed steps, one profiled step."""
    began_s = time.perf_counter()
    first = step(batches[0])
    _wait(bench.device)
    first_step_s = time.perf_counter() - began_s
    for number in range(1, bench.warmup):
        step(batches[number % NUM_BATCHES])
    _wait(bench.device)
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    marks, last = [now(bench.device)], first
    for number in range(bench.steps):
        last = step(batches[(bench.warmup + number) % NUM_BATCHES])
        marks.append(now(bench.device))
    _wait(bench.device)
    steps_s = tuple(seconds_between(begin, end) for begin, end in itertools.pairwise(marks))
    peaks = _peaks(bench.device)
    kernels = kernel_times(lambda: step(batches[0]), bench.device)
    middle_s = statistics.median(steps_s)
    tokens_per_s = bench.tokens / middle_s
    return Timed(
        name=name,
        tokens_per_s=tokens_per_s,
        step_s=middle_s,
        steps_s=steps_s,
        mfu=tokens_per_s * flops[0] / flops[1] if flops is not None else None,
        peak_allocated_bytes=peaks[0],
        peak_reserved_bytes=peaks[1],
        first_step_s=first_step_s,
        loss_first=float(first),
        loss_last=float(last),
        kernels=kernels.by_class,
        largest_kernels=kernels.largest,
    )


def _flops_per_token(bench: Bench, config: Any) -> tuple[float, float] | None:
    """(FLOP per token, peak FLOP/s of the device); None if the catalogue or the planner lacks an entry."""
    if bench.device.type != "cuda":
        return None
    device = hardware.find_device(torch.cuda.get_device_name(bench.device))
    if device is None:
        return None
    request = request_for(bench.run, bench.plan, config=config, device=device)
    dtype = bench.plan.precision.policy().weights
    peak = request.cluster.device.peak_flops.get(dtype)
    return (model_flops(request, sees_all_keys=True) / request.workload.tokens, peak) if peak else None


def _peaks(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
