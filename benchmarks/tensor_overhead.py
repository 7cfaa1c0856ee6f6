"""What tensor parallelism adds to one rank's own work: its step against the same matrices run bare, on one GPU.

    python benchmarks/tensor_overhead.py [--degrees 2 4 8] [--layers 4] [--out FILE]

weft computes one rank of tp 2, 4, 8 on the `fake` process group, whose collectives cost nothing: what remains is this
rank's matrices and whatever weft puts around them. The peer is a plain Hugging Face model whose own sizes are that
rank's slice (heads, columns and vocabulary divided by tp), trained by a hand-written loop: bfloat16 weights, float32
masters, clipping, fused AdamW. Both live in one process and take turns; the figure is the ratio of medians. Values on
the fake group are meaningless, times are not. Peaks are those of the allocator, in the same process, one after the
other. The peer has no norms over a part of the sequence and no exchange of the loss.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the `fake` backend

from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
ROWS, LENGTH = 2, 4096
ROUNDS, STEPS = 7, 3
Step = Callable[[dict[str, torch.Tensor]], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a look on a CPU")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [line for degree in given.degrees for line in compare(degree, given)]
    report = render(rows, given)
    print(report)
    if given.out is not None:
        given.out.write_text(report)


def compare(degree: int, given: argparse.Namespace) -> list[list[str]]:
    """Each way of weft against the bare loop, in turns."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degree)
    found = []
    try:
        for stream, slices in ((False, True), (True, True), (False, False)):
            ours = lambda s=stream, c=slices: weft_step(degree, given, sequence_parallel=s, loss_parallel=c)  # noqa: E731
            bare = lambda: bare_step(degree, given)  # noqa: E731
            peaks = [peak_gib(make, given) for make in (ours, bare)]
            times = in_turns(ours(), bare(), given)
            found.append(
                [
                    str(degree),
                    "yes" if stream else "no",
                    "yes" if slices else "no",
                    f"{times[0] * 1e3:.1f}",
                    f"{times[1] * 1e3:.1f}",
                    f"{times[0] / times[1]:.3f}",
                    f"{peaks[0]:.2f}",
                    f"{peaks[1]:.2f}",
                ]
            )
            print(" ".join(found[-1]), flush=True)
            free(given)
    finally:
        dist.destroy_process_group()
    return found


def shape(given: argparse.Namespace) -> dict[str, Any]:
    if given.small:
        return {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "head_dim": 8, "vocab_size": 1000}
    return dict(SHAPE)


def weft_step(degree: int, given: argparse.Namespace, *, sequence_parallel: bool, loss_parallel: bool) -> Step:
    spec = ModelSpec(type="llama", config={**shape(given), "num_hidden_layers": given.layers})
    config = build_config(spec, vocab_size=shape(given)["vocab_size"])
    source = build_skeleton(config)
    device = torch.device(given.device)
    plan = Plan.from_tables(
        {
            "mesh": {"tp": degree},
            "tensor_parallel": {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel},
            "precision": {"preset": "bf16"},
        }
    )
    engine = Engine(
        build_skeleton(config),
        plan,
        weights=InitialWeights(source, describe(source), seed=0, device=device),
        device=device,
    )
    return lambda batch: void(engine.step_nowait(batch))


def bare_step(degree: int, given: argparse.Namespace) -> Step:
    whole = shape(given)
    config = transformers.LlamaConfig(
        **{
            **whole,
            "intermediate_size": whole["intermediate_size"] // degree,
            "num_attention_heads": whole["num_attention_heads"] // degree,
            "num_key_value_heads": whole["num_key_value_heads"] // degree,
            "vocab_size": -(-whole["vocab_size"] // degree),
            "num_hidden_layers": given.layers,
        }
    )
    with torch.device(given.device):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    low = list(model.parameters())
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in low]
    optimizer = torch.optim.AdamW(masters, lr=3e-4, fused=True)
    vocabulary = config.vocab_size

    def step(batch: dict[str, torch.Tensor]) -> None:
        logits = model(input_ids=batch["input_ids"] % vocabulary, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, -2), batch["labels"].flatten() % vocabulary, reduction="sum")
        (loss / batch["labels"].numel()).backward()
        for master, parameter in zip(masters, low, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_([parameter.detach() for parameter in low], [master.detach() for master in masters])

    return step


def batch_of(given: argparse.Namespace) -> dict[str, torch.Tensor]:
    rows, length = (2, 64) if given.small else (ROWS, LENGTH)
    tokens = torch.randint(0, shape(given)["vocab_size"], (rows, length + 1), device=given.device)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def in_turns(ours: Step, bare: Step, given: argparse.Namespace) -> tuple[float, float]:
    """Median seconds a step of each."""
    batch = batch_of(given)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(2):
        ours(batch)
        bare(batch)
    for _ in range(ROUNDS):
        for step, taken in ((ours, times[0]), (bare, times[1])):
            synchronise(given)
            began_s = time.perf_counter()
            for _ in range(STEPS):
                step(batch)
            synchronise(given)
            taken.append((time.perf_counter() - began_s) / STEPS)
    return statistics.median(times[0]), statistics.median(times[1])


def peak_gib(make: Callable[[], Step], given: argparse.Namespace) -> float:
    free(given)
    step, batch = make(), batch_of(given)
    step(batch)
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step(batch)
    found = torch.cuda.max_memory_allocated() / 2**30 if given.device == "cuda" else 0.0
    del step
    free(given)
    return found


def void(_: object) -> None:
    pass


def synchronise(given: argparse.Namespace) -> None:
    if given.device == "cuda":
        torch.cuda.synchronize()


def free(given: argparse.Namespace) -> None:
    gc.collect()
    if given.device == "cuda":
        torch.cuda.empty_cache()


def render(rows: list[list[str]], given: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or platform.machine()
    head = ["tp", "sequence parallel", "loss parallel", "weft ms", "bare ms", "ratio", "weft GiB", "bare GiB"]
    lines = [
        "# One rank of tensor parallelism against its own matrices run bare",
        "",
        f"{device}, torch {torch.__version__}, transformers {transformers.__version__}; Llama of {given.layers} layers,"
        f" {shape(given)}, {ROWS} x {LENGTH} tokens, bf16; medians of {ROUNDS} turns of {STEPS} steps.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
