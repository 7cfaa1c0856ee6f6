"""Gradients that travel as codes: wire bytes, loss after 300 steps, equal ranks, and seconds on slow links.

    python benchmarks/coded_sums.py train [--steps 300] [--only tp]    4 Gloo ranks of this machine, text, by format
    python benchmarks/coded_sums.py seeds [--seeds 6]        DDP: float32, int8, and float32 moved by a millionth
    python benchmarks/coded_sums.py link [--mbit 40]         4 network namespaces with limited links (root, iproute2)

`train`: the same run in every format, under DDP, ZeRO-3, by node, with tensor parallelism; losses are means over the
last 20 steps, held-out losses of the last weights. Wire bytes are those that the ledger's observer counts in one step,
gradients alone, by axis.
`seeds`: losses of runs differ by rounding that training amplifies. A run in float32 whose initial weights are moved by
a millionth of their size shows how much; a format is judged by the mean over seeds.
`link`: seconds of an all-reduce and a reduce-scatter, each format in turn within every repeat, medians.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS = 4
FORMATS = ("float32", "bfloat16", "float8_e4m3", "int8")
ZERO3 = {"zero": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": RANKS}},
    "ZeRO-3": {"mesh": {"dp_shard": RANKS}, "data_parallel": ZERO3},
    "DDP, two nodes": {"mesh": {"dp_replicate": RANKS}, "data_parallel": {"reduce_neighbours": 2}},
    "ZeRO-3, two nodes": {"mesh": {"dp_shard": RANKS}, "data_parallel": {**ZERO3, "reduce_neighbours": 2}},
    "DDP 2 x tp 2": {"mesh": {"dp_replicate": 2, "tp": 2}},
    "ZeRO-3 2 x tp 2": {"mesh": {"dp_shard": 2, "tp": 2}, "data_parallel": ZERO3},
}
# (layout, precision.reduce, precision.gather, error feedback)
CASES: list[tuple[str, str, str | None, bool]] = [
    *(("DDP", name, None, False) for name in FORMATS),
    *(("ZeRO-3", name, None, False) for name in ("float32", "int8")),
    *((layout, "int8", None, True) for layout in ("DDP", "ZeRO-3")),
    *((f"{layout}, two nodes", "int8", None, is_on) for layout in ("DDP", "ZeRO-3") for is_on in (False, True)),
    *(("DDP 2 x tp 2", name, None, False) for name in ("float32", "int8")),
    *(("ZeRO-3 2 x tp 2", "int8", gather, is_on) for gather, is_on in ((None, False), ("int8", False), ("int8", True))),
]
RUN: dict[str, Any] = {
    "model": {
        "type": "llama",
        "config": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    },
    "data": {"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": 64},
    "train": {"steps": 300, "global_batch": 16, "learning_rate": 3e-3, "warmup_steps": 20},
}  # fmt: skip


def train_rank(rank: int, store: str, steps: int, only: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(minutes=20)
    )
    for layout, name, gather, feeds_back in CASES:
        if only not in layout:
            continue
        row = train_case(layout, name, steps, gather=gather, feeds_back=feeds_back)
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def seeds_rank(rank: int, store: str, steps: int, seeds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timedelta(minutes=20)
    )
    for seed in range(seeds):
        for name, moved_by in (("float32", 0.0), ("int8", 0.0), ("float32", 1e-6)):
            row = train_case("DDP", name, steps, gather=None, feeds_back=False, seed=seed, moved_by=moved_by)
            if rank == 0:
                print(json.dumps({"seed": seed, "moved_by": moved_by, **row}), flush=True)
    dist.destroy_process_group()


def train_case(
    layout: str,
    name: str,
    steps: int,
    *,
    gather: str | None,
    feeds_back: bool,
    seed: int = 0,
    moved_by: float = 0.0,
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from weft.core.plan import Plan
    from weft.core.run_spec import RunSpec
    from weft.data import open_corpus
    from weft.data.loader import Loader
    from weft.data.rows import RowLayout
    from weft.engine.engine import Engine
    from weft.engine.measure.meter import StepMeter
    from weft.engine.optim.optimizers import OptimizerPolicy
    from weft.models.build import build_config, build_skeleton
    from weft.models.initial import InitialWeights
    from weft.models.layout import describe
    from weft.train.rate import learning_rate_at

    run = RunSpec.from_tables(RUN)
    corpus = open_corpus(run.data)
    config = build_config(run.model, vocab_size=257)
    source = build_skeleton(config)
    engine = Engine(
        build_skeleton(config),
        Plan.from_tables(
            {
                "mesh": LAYOUTS[layout]["mesh"],
                "precision": {"reduce": name, **({"gather": gather} if gather else {})},
                "data_parallel": {**LAYOUTS[layout].get("data_parallel", {}), "error_feedback": feeds_back},
            }
        ),
        optimizer=OptimizerPolicy.of(run.train),
        weights=InitialWeights(source, describe(source), seed=seed, device=torch.device("cpu")),
        seed=seed,
        device=torch.device("cpu"),
    )
    move = torch.Generator().manual_seed(1)  # the same on every rank
    with torch.no_grad():
        for value in engine.model.parameters() if moved_by else ():
            value.mul_(1 + moved_by * torch.randn(value.shape, generator=move))
    shared = {"seed": seed, "global_batch": run.train.global_batch, "layout": RowLayout.of(run.data)}
    share = {"dp_rank": engine.topology.dp_rank, "dp_degree": engine.topology.dp_degree}
    loader = Loader(corpus.training, **shared, **share)
    held_out = Loader(corpus.evaluation or corpus.training, **shared, **share, epochs=1, shuffle=False)
    rows, losses = run.train.global_batch, []
    for step in range(steps):
        rate = learning_rate_at(run.train, step + 1)
        losses.append(engine.step(loader.batch(step * rows), learning_rate=rate).loss)
    meter = StepMeter(engine)
    with meter.measuring():
        meter.next_step()
        engine.step(loader.batch(steps * rows), learning_rate=0.0)
    is_weights = ("all_gather",) if "ZeRO-3" in layout else ()
    sent = {
        axis: sum(
            int(row["bytes"]) for row in meter.traffic if row["axis"] == axis and row["collective"] not in is_weights
        )
        for axis in ("dp_replicate", "dp_shard", "dp_inside", "dp_between")
    }
    held: list[dict[Any, str]] = [{}] * RANKS
    dist.all_gather_object(held, digests_of(engine))
    copies: dict[Any, set[str]] = {}
    for key, digest in (pair for of_rank in held for pair in of_rank.items()):
        copies.setdefault(key, set()).add(digest)
    evaluation = engine.evaluate([held_out.batch(index * rows) for index in range(8)]).loss
    engine.close()
    return {
        "layout": layout, "reduce": name, "gather": gather, "error_feedback": feeds_back, "steps": steps,
        "loss": statistics.fmean(losses[-20:]), "held_out": evaluation,
        "gradient_bytes": {axis: nbytes for axis, nbytes in sent.items() if nbytes},
        "equal_on_all_ranks": all(len(of_copies) == 1 for of_copies in copies.values()),
    }  # fmt: skip


def digests_of(engine: Any) -> dict[Any, str]:
    """Of weights and states, by the part of the full tensor that this rank holds."""
    from weft.checkpoint.parts import OF_ONE_RANK, ShardTensor

    found: dict[Any, str] = {}
    for name, value in sorted(engine.state().items()):
        if name.startswith(OF_ONE_RANK):
            continue
        if isinstance(value, ShardTensor):
            parts = {(name, one.offsets, one.sizes): value.local[one.local_index] for one in value.chunks}
        else:
            parts = {(name, (), ()): value.full_tensor() if hasattr(value, "full_tensor") else value}
        for key, part in parts.items():
            found[key] = hashlib.sha256(part.detach().float().contiguous().numpy().tobytes()).hexdigest()
    return found


def spawn(function: Callable[..., None], *args: Any) -> None:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, (str(Path(folder) / "store"), *args), nprocs=RANKS)


def link_rank(mib: float, repeats: int) -> None:
    import torch
    import torch.distributed as dist

    from weft.comm.coded_sums import CodedSum, scatter_sum

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    values = torch.randn(int(mib * 2**18), generator=torch.Generator().manual_seed(dist.get_rank()))
    ways: dict[str, Any] = {
        "all-reduce float32": lambda x: dist.all_reduce(x),
        "reduce-scatter float32": lambda x: scatter(torch.empty(x.numel() // group.size()), x),
    }
    for name in FORMATS[1:]:
        ways[f"all-reduce {name}"] = CodedSum(group, name=name).sum
        ways[f"reduce-scatter {name}"] = lambda x, name=name: scatter_sum(x.view(group.size(), -1), group, name)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way, run in ways.items():
            own = values.clone()
            dist.barrier()
            began = time.perf_counter()
            run(own)
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if repeat:
                seconds[way].append(took.item())
    if dist.get_rank() == 0:
        print(json.dumps({way: statistics.median(times) for way, times in seconds.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def link(mbit: float, mib: float, repeats: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
    from rate_limited_hosts import ranks_on, rate_limited_hosts

    command = [sys.executable, __file__, "link-rank", "--mib", str(mib), "--repeats", str(repeats)]
    with rate_limited_hosts(RANKS, mbit=mbit) as names:
        found = json.loads(ranks_on(names, command, timeout_s=900)[0])
    for way, took in found.items():
        print(f"{way:28s} {took:8.3f} s  {took / found[way.split()[0] + ' float32']:.3f} of float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "seeds", "link", "link-rank"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--only", default="", help="layouts whose name has these words")
    parser.add_argument("--mbit", type=float, default=40.0)
    parser.add_argument("--mib", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if given.what == "train":
        spawn(train_rank, given.steps, given.only)
    elif given.what == "seeds":
        spawn(seeds_rank, given.steps, given.seeds)
    elif given.what == "link":
        link(given.mbit, given.mib, given.repeats)
    else:
        link_rank(given.mib, given.repeats)


if __name__ == "__main__":
    main()
