"""The attention kernel of a shape: another than torch's own only where it is clearly faster, timed once a machine. The
kernels themselves run on a GPU (tests/gpu)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import build_engine, global_batch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend

import weft.engine.kernels.attention as attention
from weft.core.plan import Plan
from weft.engine.kernels.attention import (
    KERNELS,
    TORCHS_OWN,
    AttentionKernel,
    Shape,
    cached_choice,
    fastest,
    prefer_kernels,
    shape_of,
)

CPU = torch.device("cpu")
LARGE = Shape(rows=4, heads=32, kv_heads=8, length=4096, head_dim=64, dtype="bfloat16")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"cudnn": 1.0, "flash": 1.5, "efficient": 2.0}, TORCHS_OWN),  # it is torch's own
        ({"cudnn": 1.0, "flash": 0.97, "efficient": 2.0}, TORCHS_OWN),  # faster, but not clearly
        ({"cudnn": float("inf"), "flash": 0.8, "efficient": 0.7}, "efficient"),
        (dict.fromkeys(KERNELS, float("inf")), TORCHS_OWN),
    ],
)
def test_another_kernel_must_be_clearly_faster(times: dict[str, float], expected: str) -> None:
    assert fastest(LARGE, CPU, seconds=lambda _s, _d, name: {TORCHS_OWN: 1.0, **times}[name]) == expected


def test_a_choice_is_made_once_a_machine(tmp_path: Path) -> None:
    path, asked = tmp_path / "deep" / "attention.json", []

    def find() -> str:
        asked.append(1)
        return "flash"

    assert [cached_choice("a", find, path=path) for _ in range(3)] == ["flash"] * 3
    assert len(asked) == 1
    cached_choice("b", find, path=path)
    path.write_text(path.read_text().replace('"b": "flash"', '"b": "gone"'))
    assert cached_choice("b", find, path=path) == "flash"
    assert len(asked) == 3
    path.write_text("{")
    assert cached_choice("a", find, path=path) == "flash"


def test_the_shape_is_a_ranks_own() -> None:
    engine, batch = build_engine("llama", {}), global_batch(0)
    rows, length = batch["input_ids"].shape
    plan = Plan.from_tables({"mesh": {"tp": 2}, "precision": {"preset": "bf16"}})
    found = shape_of(engine.model, plan, batch)
    assert found == Shape(rows=rows, heads=2, kv_heads=1, length=length, head_dim=8, dtype="bfloat16")
    assert shape_of(engine.model, plan, {**batch, "position_ids": batch["input_ids"]}) is None


def test_a_gpu_times_large_shapes_once_and_keeps_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = build_engine("llama", {}), []
    monkeypatch.setattr(attention, "shape_of", lambda *_: LARGE)
    monkeypatch.setattr(AttentionKernel, "_choice_of_rank_0", lambda _self, shape: asked.append(shape) or "flash")
    on_gpu = AttentionKernel(engine.model, Plan(), torch.device("cuda"))
    for _ in range(2):
        on_gpu.choose(global_batch(0))
    assert asked == [LARGE]
    assert on_gpu.chosen == "flash"
    with on_gpu.preferred():
        order = torch._C._get_sdp_priority_order()
    assert order[0] == KERNELS["flash"].value


@pytest.mark.parametrize("way", ["a CPU", "switched off", "a small shape"])
def test_nothing_is_timed_where_nothing_is_won(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionKernel, "_choice_of_rank_0", lambda *_: pytest.fail("timed"))
    model = build_engine("llama", {}).model
    plan = Plan.from_tables({"kernels": {"attention": "torch" if way == "switched off" else "auto"}})
    kernel = AttentionKernel(model, plan, torch.device("cpu" if way == "a CPU" else "cuda"))
    if way != "a small shape":
        monkeypatch.setattr(attention, "shape_of", lambda *_: LARGE)
    kernel.choose(global_batch(0))
    assert kernel.chosen == TORCHS_OWN


def test_ranks_with_more_or_fewer_rows_agree_on_whether_to_choose() -> None:
    """The choice is a collective: a rank that has none of the last rows must not stay away from it."""
    assert {replace(LARGE, rows=rows).is_worth_timing for rows in (1, 3, 64)} == {True}
    small = replace(LARGE, length=128)
    assert {replace(small, rows=rows).is_worth_timing for rows in (1, 4096)} == {False}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_block_is_not_remembered_with_another_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch's cache of graphs would come back with the first one: it does not look at which kernels are allowed."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def misses() -> int:
        torch.compiler.reset()
        counters["aot_autograd"].clear()
        values = torch.ones(1, 2, 8, 8, requires_grad=True)
        torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))(values).sum().backward()
        return int(counters["aot_autograd"]["autograd_cache_miss"])

    assert (misses(), misses()) == (1, 0)
    with prefer_kernels(SDPBackend.MATH):
        assert misses() == 1
