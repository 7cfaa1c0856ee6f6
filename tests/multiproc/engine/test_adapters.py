"""Low-rank adapters have the curve of one process on every axis: gradients of replicated factors are summed rightly."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from adapters import adapted_curve
from gloo_ranks import run_ranks
from samples import by_default
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

STEPS = 6
DDP, SHARD, TP, PP = ({key: 2} for key in ("dp_replicate", "dp_shard", "tp", "pp"))
ACCUMULATED = {"pipeline": {"microbatches": 2}}
OF_TWO: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": DDP, **ACCUMULATED},
    "ZeRO-1": {"mesh": SHARD, "data_parallel": {"zero": 1}, **ACCUMULATED},
    "ZeRO-2": {"mesh": SHARD, "data_parallel": {"zero": 2}, **ACCUMULATED},
    "ZeRO-3, recompute": {"mesh": SHARD, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
    "tp, sequence parallel": {"mesh": TP},
    "tp": {"mesh": TP, "tensor_parallel": {"sequence_parallel": False}, **ACCUMULATED},
    "pp": {"mesh": PP, "pipeline": {"microbatches": 4, "schedule": "1f1b"}},
    "pp, zero bubble": {"mesh": PP, "pipeline": {"microbatches": 4, "schedule": "zero_bubble"}},
    "fused loss, moments on the host": {
        "mesh": SHARD, "data_parallel": {"zero": 3}, "kernels": {"loss": "fused"}, "offload": {"optimizer": "cpu"},
    },
}  # fmt: skip
OF_FOUR: dict[str, dict[str, Any]] = {
    "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
    "ZeRO-3 x tp": {"mesh": {"dp_shard": 2, "tp": 2}, "data_parallel": {"zero": 3}},
    "tp 4": {"mesh": {"tp": 4}},  # more ranks than key-value heads: neighbours repeat a head, and its rows of B
    "pp x tp": {"mesh": {"pp": 2, "tp": 2}, "pipeline": {"microbatches": 4, "schedule": "1f1b"}},
    "pp x ZeRO-1": {
        "mesh": {"pp": 2, "dp_shard": 2}, "data_parallel": {"zero": 1},
        "pipeline": {"microbatches": 2, "schedule": "1f1b"},
    },
}  # fmt: skip
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "ep": {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}},
    "ep x tp": {"mesh": {"tp": 2, "ep": 2}},
}
CASES = {
    ("qwen3-tied", 2): OF_TWO, ("gpt2", 2): OF_TWO, ("qwen3-tied", 4): OF_FOUR, ("gpt2", 4): OF_FOUR,
    ("mixtral", 2): OF_EXPERTS,
}  # fmt: skip
# some trained in full beside, of one target each kind of layer
OPTIONS: dict[str, dict[str, Any]] = {"qwen3-tied": {"adapter": {"train_also": ["*norm.weight"]}}}
DEFAULT = ("ZeRO-3, recompute", "tp, sequence parallel", "pp")


def curves(
    _rank: int, _world: int, family: str, names: list[str], base: str = "model"
) -> dict[str, list[tuple[float, float]]]:
    plans = {"one": {}, **OF_TWO, **OF_FOUR, **OF_EXPERTS}
    options = OPTIONS.get(family, {})
    options = {**options, "adapter": {**options.get("adapter", {}), "base": base}}
    found = {name: adapted_curve(family, plans[name], STEPS, **options) for name in names}
    dist.barrier()
    return found


def require_same(family: str, world: int, names: list[str], *, base: str = "model") -> None:
    expected = run_ranks(curves, 1, family, ["one"], base)[0]["one"]
    per_rank = run_ranks(curves, world, family, names, base, timeout_s=240.0)
    for name, found in per_rank[0].items():
        losses = max(abs(a[0] - b[0]) for a, b in zip(expected, found, strict=True))
        norms = max(abs(a[1] - b[1]) / a[1] for a, b in zip(expected, found, strict=True))
        assert losses <= SAME_CURVE_LOSS_ABS, f"{family} under {name}: losses differ by {losses:.1e}"
        assert norms <= SAME_CURVE_NORM_REL, f"{family} under {name}: norms differ by {norms:.1e}"
    assert len({loss for loss, _ in expected}) == STEPS  # a curve, not a constant


def test_adapters_have_the_curve_of_one_process() -> None:
    require_same("qwen3-tied", 2, list(DEFAULT))


def test_a_quantised_base_has_the_curve_of_one_process() -> None:
    require_same("qwen3-tied", 2, ["ZeRO-2", "tp, sequence parallel", "pp, zero bubble"], base="nf4")


@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize(
    ("family", "world"), by_default([], CASES, extended=[("qwen3-tied", 2), ("qwen3-tied", 4), ("mixtral", 2)])
)
def test_a_quantised_base_under_every_layout(family: str, world: int, base: str) -> None:
    names = [name for name in CASES[family, world] if not (name == "tp 4" and family == "qwen3-tied")]
    require_same(family, world, names, base=base)


@pytest.mark.parametrize(("family", "world"), by_default([], CASES, extended=[("qwen3-tied", 2), ("qwen3-tied", 4)]))
def test_every_layout(family: str, world: int) -> None:
    require_same(family, world, list(CASES[family, world]))
