"""What measuring costs: a measured step against a plain step of the same engine, and against a run of 200 steps.

    python benchmarks/ledger_cost.py                  # one rank, and 2 Gloo ranks: DDP, ZeRO-2, ZeRO-3
    python benchmarks/ledger_cost.py --device cuda    # one GPU: fp32, bf16

Plain and measured steps take turns in the same processes, so a busy machine disturbs both alike; figures are medians.
A run measures its first two steps, so its cost is (first + second - 2 plain) / (200 plain).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe
from weft.train.ledger.measuring import Measuring

RUN_STEPS = 200
ROTARY = {"num_attention_heads": 8, "num_key_value_heads": 4}
SHAPES = {
    "cpu": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 320, **ROTARY},
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32000, **ROTARY},
}
BATCH = {"cpu": (8, 256), "cuda": (8, 2048)}  # sequences, tokens


@dataclass(frozen=True)
class Case:
    name: str
    num_ranks: int
    plan: dict[str, Any]


CASES = {
    "cpu": [
        Case("one rank", 1, {}),
        Case("DDP", 2, {"mesh": {"dp_replicate": 2}}),
        Case("ZeRO-2", 2, {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}}),
        Case("ZeRO-3", 2, {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}),
    ],
    "cuda": [
        Case("fp32", 1, {"precision": {"preset": "fp32"}}),
        Case("bf16", 1, {"precision": {"preset": "bf16"}}),
        Case("bf16, ZeRO-3 of one", 1, {"precision": {"preset": "bf16"}, "data_parallel": {"zero": 3}}),
    ],
}


@dataclass(frozen=True)
class Times:
    """Medians, in seconds."""

    plain: float
    first: float
    second: float

    @property
    def a_step(self) -> float:
        return (self.first + self.second) / 2 / self.plain - 1

    @property
    def a_run(self) -> float:
        return (self.first + self.second - 2 * self.plain) / (RUN_STEPS * self.plain)


def measure(rank: int, case: Case, kind: str, rounds: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind)
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=case.num_ranks)
    engine = build_engine(case, kind)
    rows, tokens = BATCH[kind]
    ids = torch.randint(0, 256, (rows // case.num_ranks, tokens), generator=torch.Generator().manual_seed(rank))
    batch = {"input_ids": ids, "labels": ids.clone()}
    for _ in range(3):
        engine.step(batch)
    plain, first, second = [], [], []
    for _ in range(rounds):
        plain += [timed(engine, batch, device) for _ in range(3)]
        measuring = Measuring(engine)
        for times in (first, second):
            began_s = time.perf_counter()
            with measuring.step():
                engine.step(batch)
            times.append(time.perf_counter() - began_s)
        measuring.finish()
        if measuring.notes:
            raise RuntimeError(measuring.notes[0])
    if rank == 0:
        results.put([statistics.median(times) for times in (plain, first, second)])
    dist.barrier()
    dist.destroy_process_group()


def timed(engine: Engine, batch: dict[str, torch.Tensor], device: torch.device) -> float:
    began_s = time.perf_counter()
    engine.step(batch)
    return time.perf_counter() - began_s


def build_engine(case: Case, kind: str) -> Engine:
    config = build_config(ModelSpec(type="llama", config=SHAPES[kind]), vocab_size=SHAPES[kind]["vocab_size"])
    skeleton = build_skeleton(config)
    device = torch.device(kind)
    return Engine(
        build_skeleton(config),
        Plan.from_tables(case.plan),
        optimizer=OptimizerPolicy(learning_rate=1e-4),
        weights=InitialWeights(skeleton, describe(skeleton), seed=0, device=device),
        device=device,
    )


def carry_out(case: Case, kind: str, rounds: int) -> Times:
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (case, kind, rounds, f"{folder}/store", results)
        mp.start_processes(measure, args=arguments, nprocs=case.num_ranks, start_method="spawn")
        return Times(*results.get())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()}, one thread a rank"
    print(f"{name}, torch {torch.__version__}, {given.rounds} rounds\n")
    print("| case | plain step | first measured | second measured | a measured step | a run of 200 steps |")
    print("| --- | --- | --- | --- | --- | --- |")
    for case in CASES[given.device]:
        found = carry_out(case, given.device, given.rounds)
        steps = " | ".join(f"{1000 * seconds:.0f} ms" for seconds in (found.plain, found.first, found.second))
        print(f"| {case.name} | {steps} | {found.a_step:+.0%} | {found.a_run:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
