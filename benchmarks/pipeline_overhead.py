"""weft's 1F1B against torch.distributed.pipelining's `Schedule1F1B` on the same stages, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_overhead.py [--degrees 2 4] [--rounds 20] [--out FILE]

Both sides live in the same Gloo ranks and have the same blocks of the same Hugging Face Llama, the same micro-batches,
loss function and fused AdamW, and both clip by the norm of all stages. torch's side is what a careful engineer writes:
a stage module that calls its blocks (weft runs the model's own forward), `PipelineStage`, `Schedule1F1B` that keeps no
outputs. Losses of every step and gradients of the first one are compared, which makes it a fair peer.

Sides take turns step by step, with a barrier before each and the order changed every round; figures are medians on rank
0, which begins first and ends last: of forwards and backwards alone, and of the whole step with norm, clipping,
optimizer and the loss that every rank is told.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo import run_ranks
from pipeline_model import (
    CPU,
    MICROBATCHES,
    build_engine,
    build_model,
    build_optimizer,
    make_batch,
    pin,
    sizes,
    table,
    versions,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from weft.core.quiet import quiet_libraries
from weft.core.terms import TimeTerm
from weft.engine.engine import Engine
from weft.engine.objective import token_loss_sum
from weft.engine.pp.runtime import PipelineRuntime

BOUND = 1.03
LOSS_BOUND, GRADIENT_BOUND = 1e-6, 1e-6  # relative: the same operators in the same order
CLIP_NORM = 1.0
LIMIT_S = 600
Facts = dict[str, Any]
Taken = tuple[float, float, float]  # seconds of forwards and backwards, of the whole step; the loss
Step = Callable[[], Taken]


class HandStage(torch.nn.Module):
    """Blocks `names` of a Llama, with the table in front of the first and norm and head behind the last."""

    def __init__(self, model: Any, names: tuple[str, ...], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if is_first else None
        self.rotary = model.model.rotary_emb
        self.blocks = torch.nn.ModuleList([model.get_submodule(name) for name in names])
        self.head = torch.nn.Sequential(model.model.norm, model.lm_head) if is_last else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = given if self.embed is None else self.embed(given)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        angles = self.rotary(hidden, position_ids=positions)
        for block in self.blocks:
            hidden = block(
                hidden, attention_mask=None, position_embeddings=angles, position_ids=positions, use_cache=False
            )
        return hidden if self.head is None else self.head(hidden)


def weft_side(engine: Engine, batch: dict[str, torch.Tensor]) -> Step:
    def step() -> Taken:
        began_s = time.perf_counter()
        pending = engine.step_nowait(batch)
        loss = pending.resolve()[0].loss
        return pending.timer.seconds()[TimeTerm.FORWARD_BACKWARD], time.perf_counter() - began_s, loss

    return step


def torch_side(
    stages: tuple[tuple[str, ...], ...], batch: dict[str, torch.Tensor], *, small: bool, gradients: Facts
) -> Step:
    """`gradients` is filled by the first step, before clipping."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = build_model(small=small)
    module = HandStage(model, stages[rank], is_first=rank == 0, is_last=rank == last)
    own = {id(parameter) for parameter in module.parameters()}
    named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in own}
    optimizer = build_optimizer(list(named.values()))
    weight = batch["labels"].numel()
    schedule = Schedule1F1B(
        PipelineStage(module, rank, last + 1, CPU),
        MICROBATCHES,
        loss_fn=lambda logits, labels: token_loss_sum(logits, labels) / weight,
        scale_grads=False,
    )

    def step() -> Taken:
        began_s = time.perf_counter()
        losses: list[torch.Tensor] = []
        if rank == last:
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        else:
            schedule.step(*([batch["input_ids"]] if rank == 0 else []))
        walked_s = time.perf_counter() - began_s
        if not gradients:
            gradients.update({name: parameter.grad.clone() for name, parameter in named.items()})
        clip(list(named.values()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return walked_s, time.perf_counter() - began_s, loss.item()

    return step


@torch.no_grad()
def clip(parameters: list[torch.nn.Parameter]) -> None:
    """By the norm of the gradients of all stages."""
    square = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]).square()
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, square.sqrt(), foreach=True)


def compare(rank: int, degree: int, rounds: int, small: bool) -> Facts:
    """On each rank: seconds of both sides, and the worst differences of their numbers."""
    quiet_libraries()
    engine = build_engine(degree=degree, schedule="1f1b", small=small)
    batch = make_batch(small=small)
    gradients: dict[str, Facts] = {"weft": {}, "torch": {}}

    def keep(found: dict[str, torch.Tensor]) -> None:
        gradients["weft"].update({name: value.clone() for name, value in found.items()})
        engine.on_gradients = None

    engine.on_gradients = keep
    pipeline = PipelineRuntime.of(engine)
    if pipeline is None:
        raise RuntimeError("the engine has no pipeline")
    runner = pipeline.schedule_runner
    sides = {
        "weft": weft_side(engine, batch),
        "torch": torch_side(runner.stages.split.stages, batch, small=small, gradients=gradients["torch"]),
    }
    pin(rank)
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    for turn in range(rounds + 2):
        for name in sorted(sides, reverse=bool(turn % 2)):
            dist.barrier()
            taken[name].append(sides[name]())
    losses = {name: [loss for _, _, loss in rows] for name, rows in taken.items()}
    return {
        "loss_difference": max(abs(a - b) / abs(b) for a, b in zip(losses["weft"], losses["torch"], strict=True)),
        "gradient_difference": worst_difference(gradients["weft"], gradients["torch"]),
        "loss": losses["weft"][-1],
        "walk_s": {name: [row[0] for row in rows[2:]] for name, rows in taken.items()},
        "step_s": {name: [row[1] for row in rows[2:]] for name, rows in taken.items()},
    }


def worst_difference(ours: Facts, theirs: Facts) -> float:
    if set(ours) != set(theirs):
        raise RuntimeError(f"gradients on one side only: {sorted(set(ours) ^ set(theirs))[:3]}")
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def judge(degree: int, *, rounds: int, small: bool) -> list[Facts]:
    """A row for the runner and one for the whole step; an error where the two do not compute the same."""
    found = run_ranks(compare, degree, rounds, small, timeout_s=LIMIT_S)
    numbers = {
        "loss": max(one["loss_difference"] for one in found),
        "gradient": max(one["gradient_difference"] for one in found),
    }
    if not (numbers["loss"] <= LOSS_BOUND and numbers["gradient"] <= GRADIENT_BOUND):
        raise SystemExit(f"pp {degree}: not the same numbers, so no fair peer: {numbers}")
    return [
        {"degree": degree, "what": what, **ratio_of(found[0][key]), **numbers}
        for key, what in (("walk_s", "forwards and backwards"), ("step_s", "whole step"))
    ]


def ratio_of(seconds: dict[str, list[float]]) -> Facts:
    """Of medians; beside it the quartiles of the rounds' own ratios, which tell how busy the machine was."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rounds = [ours / theirs for ours, theirs in zip(seconds["weft"], seconds["torch"], strict=True)]
    low, _, high = statistics.quantiles(rounds, n=4)
    return {**medians, "ratio": medians["weft"] / medians["torch"], "low": low, "high": high}


def result_page(rows: list[Facts], given: argparse.Namespace) -> str:
    head = ["pp", "what", "weft ms", "torch ms", "weft / torch", "bound", "middle half of rounds", "gradients differ"]
    told = [
        [
            str(row["degree"]),
            row["what"],
            f"{row['weft'] * 1e3:.0f}",
            f"{row['torch'] * 1e3:.0f}",
            f"{row['ratio']:.3f}",
            f"{BOUND:.2f}{'' if row['ratio'] <= BOUND else ': missed'}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{row['gradient']:.0e}" if row["gradient"] else "in no bit",
        ]
        for row in rows
    ]
    lines = [
        f"# weft's 1F1B against torch.distributed.pipelining, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats first: Gloo ranks of one machine, where messages are copies in memory; with more ranks than cores",
        "both sides share cores. `whole step` has norm, clipping, fused AdamW and the exchange of the loss on both.",
        f"Medians of {given.rounds} steps each, in turns. A wide middle half of rounds says: a busy machine.",
        "",
        f"- {versions()}",
        f"- {sizes(small=given.small)}",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/pipeline_overhead.py --out FILE`",
        "",
        *table(head, told),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="sizes for a look")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [row for degree in given.degrees for row in judge(degree, rounds=given.rounds, small=given.small)]
    page = result_page(rows, given)
    print(page)
    if given.out:
        given.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
