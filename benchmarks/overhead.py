"""Step time and memory of weft against a hand-written torch loop of the same strategy on the same model, same run.

    python benchmarks/overhead.py                  # 2 Gloo ranks: DDP, ZeRO-2, ZeRO-3
    python benchmarks/overhead.py --device cuda    # one GPU: fp32, bf16 (one-rank FSDP2 by hand, and autocast)

Both sides live in the same processes and take turns, a few steps each, so a busy machine disturbs both alike; the
figure is the ratio of medians. Peak memory is measured in processes of their own: the allocator's peak on a GPU, the
resident high-water mark on a CPU, there the median of several processes and with a larger model than the timing's,
since the mark of a 600 MiB process varies by 4% from one run to the next. The hand-written side clips, steps a fused
AdamW and reads its loss, as weft does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[dict[str, torch.Tensor]], float]

SHAPES = {
    "cpu": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 320,
    },
    "cpu-memory": {
        "hidden_size": 640,
        "intermediate_size": 1920,
        "num_hidden_layers": 10,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "vocab_size": 8192,
    },
    "cuda": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
}
BATCH = {"cpu": (8, 256), "cuda": (8, 2048)}
PEAK_PROCESSES = {"cpu": 5, "cuda": 1}


@dataclass(frozen=True)
class Case:
    name: str
    plan: dict[str, Any]
    by_hand: str  # ddp | zero2 | zero3 | plain | autocast
    microbatches: int = 2


CASES = {
    "cpu": [
        Case("DDP", {"mesh": {"dp_replicate": 2}}, "ddp"),
        Case("ZeRO-2", {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}}, "zero2"),
        Case("ZeRO-3", {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}, "zero3"),
    ],
    "cuda": [
        Case("fp32 against a plain loop", {}, "plain"),
        Case(
            "bf16 ZeRO-3 against FSDP2 by hand",
            {"data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}},
            "zero3",
        ),
        Case("bf16 against autocast", {"precision": {"preset": "bf16"}}, "autocast"),
    ],
}


def build_model(device: str, *, for_memory: bool = False) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(**shape_of(device, for_memory=for_memory))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").to(device)


def shape_of(device: str, *, for_memory: bool) -> dict[str, int]:
    return SHAPES["cpu-memory" if for_memory and device == "cpu" else device]


def weft_step(case: Case, device: str, *, for_memory: bool = False) -> Step:
    from weft.core.plan import Plan
    from weft.engine.engine import Engine
    from weft.engine.optim.optimizers import OptimizerPolicy

    plan = Plan.from_tables({**case.plan, "pipeline": {"microbatches": case.microbatches}})
    model = build_model(device, for_memory=for_memory)
    engine = Engine(model, plan, optimizer=OptimizerPolicy(learning_rate=1e-4), device=_device(device))
    return lambda batch: engine.step(batch).loss


def hand_step(case: Case, device: str, *, for_memory: bool = False) -> Step:
    """What a careful engineer writes for this one strategy."""
    model = build_model(device, for_memory=for_memory)
    world = dist.get_world_size()
    sharded = case.by_hand in ("zero2", "zero3")
    if case.by_hand == "ddp":
        called: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif sharded:
        mesh = init_device_mesh(device, (world,))
        mixed = MixedPrecisionPolicy()
        if device == "cuda":
            mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=case.by_hand == "zero3")
        called = model
    else:
        called = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> float:
        total = 0.0
        pieces = [batch[key].chunk(case.microbatches) for key in ("input_ids", "labels")]
        for index, (ids, labels) in enumerate(zip(*pieces, strict=True)):
            last = index == case.microbatches - 1
            if case.by_hand == "ddp":
                called.require_backward_grad_sync = last
            elif sharded:
                model.set_is_last_backward(last)
                model.set_reshard_after_backward(last or case.by_hand == "zero3")
            with torch.autocast(device, torch.bfloat16, enabled=case.by_hand == "autocast"):
                logits = called(input_ids=ids, use_cache=False).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / case.microbatches
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return step


def interleave(case: Case, device: str, *, rounds: int, burst: int) -> dict[str, Any]:
    """Median step time of both sides, taking turns."""
    batch = make_batch(device)
    sides = {"weft": weft_step(case, device), "by_hand": hand_step(case, device)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        for _ in range(3):
            step(batch)
    for turn in range(rounds):
        for name in sorted(sides, reverse=bool(turn % 2)):
            for _ in range(burst):
                dist.barrier()
                began_s = time.perf_counter()
                sides[name](batch)
                _synchronise(device)
                seconds[name].append(time.perf_counter() - began_s)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"step_s": medians, "ratio": medians["weft"] / medians["by_hand"], "steps_each": rounds * burst}


def peak(case: Case, device: str, *, side: str, steps: int = 4) -> int:
    """Peak bytes of one side alone in this process."""
    step = (weft_step if side == "weft" else hand_step)(case, device, for_memory=True)
    batch = make_batch(device)
    for _ in range(steps):
        step(batch)
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_batch(device: str) -> dict[str, torch.Tensor]:
    rows, length = BATCH[device]
    rows //= dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, SHAPES[device]["vocab_size"], (rows, length + 1), generator=generator).to(device)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def rank_main(rank: int, world: int, port: int, device: str, task: dict[str, Any], answers: Any) -> None:
    torch.set_num_threads(1 if device == "cpu" else 8)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    case = Case(**task["case"])
    if task["what"] == "time":
        result: Any = interleave(case, device, rounds=task["rounds"], burst=task["burst"])
    else:
        result = peak(case, device, side=task["side"])
    if rank == 0:
        answers.put(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run(device: str, world: int, task: dict[str, Any]) -> Any:
    """One task in fresh processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=rank_main, args=(r, world, port, device, task, answers)) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"a rank failed: {[process.exitcode for process in ranks]}")
    return json.loads(answers.get())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--burst", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", help="write the figures as JSON here")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    world = 2 if options.device == "cpu" else 1
    rows = []
    for case in (case for case in CASES[options.device] if options.only in case.name):
        task: dict[str, Any] = {"case": vars(case), "what": "time", "rounds": options.rounds, "burst": options.burst}
        timing = run(options.device, world, task)
        found: dict[str, list[int]] = {"by_hand": [], "weft": []}
        for _ in range(PEAK_PROCESSES[options.device]):
            for side, values in found.items():
                values.append(run(options.device, world, {"case": vars(case), "what": "peak", "side": side}))
        peaks = {side: statistics.median(values) for side, values in found.items()}
        rows.append({"case": case.name, **timing, "peak_bytes": found, "peak_ratio": peaks["weft"] / peaks["by_hand"]})
        ours_ms, theirs_ms = (timing["step_s"][side] * 1e3 for side in ("weft", "by_hand"))
        ours_mib, theirs_mib = (peaks[side] / 2**20 for side in ("weft", "by_hand"))
        print(
            f"{case.name:36s} step {ours_ms:8.1f} / {theirs_ms:8.1f} ms = {timing['ratio']:.3f}"
            f"   peak {ours_mib:8.0f} / {theirs_mib:8.0f} MiB = {rows[-1]['peak_ratio']:.3f}",
            flush=True,
        )
    if options.out:
        name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
        facts = {"device": name, "torch": torch.__version__, "python": platform.python_version(), "rows": rows}
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)


def _device(device: str) -> torch.device:
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
