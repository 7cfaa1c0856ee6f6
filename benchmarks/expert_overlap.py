"""Exchanges of tokens that shared experts and other parts of the batch hide, on one GPU with an emulated link.

    python benchmarks/expert_overlap.py --out benchmarks/results/expert_overlap-DATE-h200.md

A rank of 8 (`weft.comm.loopback`), whose exchanges take bytes / bandwidth on a stream of their own, as NCCL's do: a
kernel waits there for that time. Engines take turns in one process: one calls shared experts after the experts, as the
model's code does, one overlaps them with the exchange of tokens, and one exchanges the tokens in two parts as well
(`expert_parallel.chunks = 2`).
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import weft.engine.ep.apply as expert_parallel
from weft.comm.loopback import LoopbackGroup
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.train.bench import Bench, Timed, measure_engine

# DeepSeek-V2-Lite's sizes (64 experts of which 6, two shared ones) in DeepSeek-V3's code, 6 layers
SHAPE = {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "vocab_size": 32000,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
RANKS, ROWS, SEQUENCE = 8, 4, 4096
# name: are shared experts overlapped; parts of the tokens
CASES = {"after": (False, 1), "beside": (True, 1), "two parts": (True, 2)}


class _StreamWork(dist.Work):  # type: ignore[misc]
    """A collective on a stream of its own."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._done = stream.record_event()

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self._done)
        return True


@contextmanager
def emulated_link(gigabytes_per_s: float) -> Iterator[None]:
    """Collectives of a loopback that carry hidden states take time on a link, beside the kernels of the step."""
    link, cycles_per_s = torch.cuda.Stream(), _cycles_per_s()

    def slow(original: Any) -> Any:
        def collective(self: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            if output.dtype != torch.bfloat16 or output.dim() == 0:
                return original(self, output, given, *args, **kwargs)
            link.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(link):
                original(self, output, given, *args, **kwargs)
                nbytes = max(output.nbytes, given.nbytes) * (self.size() - 1) / self.size()
                torch.cuda._sleep(int(nbytes / (gigabytes_per_s * 1e9) * cycles_per_s))
            output.record_stream(link)
            given.record_stream(link)
            return _StreamWork(link)

        return collective

    with ExitStack() as stack:
        for name in ("all_to_all_single", "alltoall_base"):
            original = getattr(LoopbackGroup, name)
            stack.enter_context(mock.patch.object(LoopbackGroup, name, slow(original)))
        yield


def _cycles_per_s() -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        torch.cuda.synchronize()
    return 1e8 / (begin.elapsed_time(end) * 1e-3)


def measured(gigabytes_per_s: float | None, case: str, *, steps: int) -> Timed:
    overlaps, chunks = CASES[case]
    tables = {
        "mesh": {"dp_shard": RANKS, "ep": RANKS}, "data_parallel": {"zero": 2}, "precision": {"preset": "bf16"},
        "compile": {"enabled": True}, "kernels": {"loss": "fused"},
        "expert_parallel": {"dispatcher": "tokens", "chunks": chunks},
    }  # fmt: skip
    run = {
        "model": {"type": "deepseek_v3", "config": SHAPE},
        "data": {"sequence_length": SEQUENCE},
        "train": {"global_batch": ROWS * RANKS},
    }
    device = torch.device("cuda", 0)
    bench = Bench(run=RunSpec.from_tables(run), plan=Plan.from_tables(tables), device=device, steps=steps)
    with ExitStack() as stack:
        if gigabytes_per_s is not None:
            stack.enter_context(emulated_link(gigabytes_per_s))
        if not overlaps:
            stack.enter_context(mock.patch.object(expert_parallel, "overlap_shared", return_value=None))
        timed, *_ = measure_engine(bench)
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--links", nargs="*", type=float, default=[200.0, 50.0], help="GB/s; no link comes first")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rows = []
    for link in (None, *options.links):
        found: dict[str, list[Timed]] = {case: [] for case in CASES}
        for _ in range(options.rounds):
            for case, timed in found.items():
                timed.append(measured(link, case, steps=options.steps))
        step_ms = {case: statistics.median(one.step_s for one in timed) * 1e3 for case, timed in found.items()}
        peak_gib = [max(one.peak_allocated_bytes for one in timed) / 2**30 for timed in found.values()]
        losses = {one.loss_last for timed in found.values() for one in timed}
        cells = ["none" if link is None else f"{link:g} GB/s", *(f"{ms:.1f}" for ms in step_ms.values())]
        cells += [f"{step_ms['after'] / step_ms[case]:.3f}" for case in list(CASES)[1:]]
        rows.append("| " + " | ".join([*cells, *(f"{gib:.2f}" for gib in peak_gib)]) + " |")
        print(rows[-1], "losses:", sorted(losses), flush=True)
    page = [
        "# Compute beside the exchange of tokens",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}. Rank 0 of {RANKS}, ep",
        f"{RANKS}, DeepSeek-V2-Lite's sizes at {SHAPE['num_hidden_layers']} layers, {ROWS} x {SEQUENCE} tokens, bf16,",
        'compiled, ZeRO-2, `dispatcher = "tokens"`. The link is emulated: exchanges take bytes / bandwidth on a stream',
        "of their own. Medians of the steps of engines in turns.",
        "",
        "| link | after the experts, ms | beside the exchange, ms | and two parts, ms | ratio, beside |"
        " ratio, two parts | peak GiB, after | peak GiB, beside | peak GiB, two parts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    if options.out:
        options.out.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
