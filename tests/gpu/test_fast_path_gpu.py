"""The fast path on a real GPU: its kernels against float64, compiled blocks and a fused loss against eager ones, the
default, and what a whole run says of it. Run by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_engines import CUDA, engine_on, losses, worst
from tiny import FAMILIES, build_engine, global_batch
from tolerances import BF16_SAME_LOSS_ABS, GPU_FP32_LOSS_ABS
from torch._dynamo.utils import counters

import weft.engine.kernels.attention as attention
import weft.engine.kernels.head_loss as head_loss
from weft.core.run_spec import ModelSpec, RouterSpec
from weft.engine.dp.float8_gather import quantise_shard
from weft.engine.dp.reduce_scatter_copy import patch_reduce_scatter_copy
from weft.engine.kernels.attention import Shape
from weft.engine.kernels.compiled import failures
from weft.engine.kernels.cross_entropy import Cap, cross_entropy_
from weft.engine.kernels.float8 import _columns_first, _multiply, quantise
from weft.engine.kernels.float8_operands import E4M3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # the compiler's own: deprecated imports, advice, tracing
]
FAST = {"compile": {"enabled": True}, "kernels": {"loss": "fused"}}


@pytest.mark.parametrize("cap", [Cap(), Cap(before=0.5), Cap(before=1 / 30, after=30.0, is_capped=True)])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("vocab_size", [257, 5000, 128256])
def test_the_triton_cross_entropy(cap: Cap, dtype: torch.dtype, allowed: float, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    logits = (torch.randn(300, vocab_size, device=CUDA) * 3).to(dtype)
    labels = torch.randint(0, vocab_size, (300,), device=CUDA)
    labels[::7] = -100
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(cap.of(leaf), labels, ignore_index=-100, reduction="sum")
    loss.backward()
    found = cross_entropy_(logits, labels, cap, wants_gradient=True)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    assert leaf.grad is not None
    assert ((logits.double() - leaf.grad).norm() / leaf.grad.norm()).item() <= allowed


def test_a_head_in_stretches_accumulates_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for elements in (2**40, 64 * 1000):
        monkeypatch.setattr(head_loss, "CHUNK_ELEMENTS", elements)
        torch.manual_seed(0)
        hidden = torch.randn(1, 500, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(1000, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, 1000, (1, 500), device=CUDA)
        head_loss.LazyLogits(hidden, weight, None).loss_sum(labels).backward()
        assert weight.grad is not None
        gradients.append(weight.grad.float())
    assert ((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item() < 4e-3


def test_a_scale_is_not_rounded_to_the_gradients_format() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1, 500, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 1000, (1, 500), device=CUDA)
    sums = []
    for scale in (1.0, 1 / 240):
        loss = head_loss.LazyLogits(hidden, weight, None).loss_sum(labels) * torch.tensor(scale, device=CUDA)
        found = torch.autograd.grad(loss, (hidden, weight))
        sums.append([value.double().abs().sum().item() / scale for value in found])
    # rounded first it would be 3.4e-3; rounding the results is 1.1e-4 here, on a CPU too
    assert sums[1] == pytest.approx(sums[0], rel=3e-4)


def test_float8_products_are_those_of_their_operands() -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(256, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    a, a_scale = quantise(left, E4M3)
    b, b_scale = quantise(right, E4M3)
    expected = (a.double() * a_scale) @ (b.double() * b_scale).t()
    for operand in (b.t(), _columns_first(b.t())):
        found = _multiply(a, operand, a_scale, b_scale, torch.bfloat16, is_fast=False)
        assert ((found.double() - expected).norm() / expected.norm()).item() < 4e-3


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "mixtral"])
@pytest.mark.parametrize("zero", [0, 3])
def test_compiled_blocks_and_a_fused_loss_train_as_eager_ones(family: str, zero: int) -> None:
    tables: dict[str, Any] = {"data_parallel": {"zero": zero}, "pipeline": {"microbatches": 2}}
    assert worst(losses(engine_on(CUDA, family, tables)), losses(engine_on(CUDA, family, {**tables, **FAST}))) <= (
        GPU_FP32_LOSS_ABS
    )
    low = {**tables, "precision": {"preset": "bf16"}}
    assert worst(losses(engine_on(CUDA, family, low)), losses(engine_on(CUDA, family, {**low, **FAST}))) <= (
        BF16_SAME_LOSS_ABS * 2
    )


@pytest.mark.parametrize(("router", "graphs"), [(RouterSpec(), 2), (RouterSpec(balance_loss=0.01), 11)])
def test_every_block_of_a_mixture_is_compiled(router: RouterSpec, graphs: int) -> None:
    """Counting shares one graph; a loss of the router is an object of its own in each block."""
    mixtral = ModelSpec(type="mixtral", config={**FAMILIES["mixtral"].config, "num_hidden_layers": 10})
    torch.compiler.reset()
    counters.clear()
    engine = build_engine(mixtral, {**FAST, "precision": {"preset": "bf16"}}, device=CUDA, router=router)
    engine.step({key: value.to(CUDA) for key, value in global_batch(0).items()})
    assert counters["stats"]["unique_graphs"] == graphs
    assert not failures(engine.model)


def test_a_run_is_fast_by_itself_and_says_what_was_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "weft", "train", "--out", str(out), "--set", "train.steps=6"]
    ended = subprocess.run([*command, "--set", "ledger.dry_run=false"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    ledger = json.loads((out / "ledger.json").read_text())
    on = {row["technique"]: row["on"] for row in ledger["fast_path"]}
    assert on["compiled blocks"]
    assert on["fused head and loss"]
    assert "fast path: compiled blocks" in ended.stderr
    terms = ledger["memory"]["terms"]
    assert terms["activations"]["measured"] > 0


def test_verify_judges_the_fast_path(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\ntype = "llama"\nconfig = { hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2, '
        "num_attention_heads = 4, num_key_value_heads = 2 }\n[data]\nsequence_length = 32\n[train]\nsteps = 20\n"
        "global_batch = 8\nlearning_rate = 0.01\n"
    )
    fast = ["precision.preset=bf16", "compile.enabled=true", "kernels.loss=fused"]
    for settings in (fast, [*fast, "float8.linears=all"]):
        options = [part for setting in settings for part in ("--set", setting)]
        command = [sys.executable, "-m", "weft", "verify", str(run), "--json", *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        verdict = json.loads(ended.stdout.strip().splitlines()[-1])
        assert verdict.get("ok"), [check for check in verdict.get("checks", [verdict]) if not check.get("ok")]


@pytest.mark.parametrize("size", [(512, 1024), (7, 1001)])
def test_shards_are_quantised_as_torch_does_it(size: tuple[int, int]) -> None:
    shard = torch.randn(size, device=CUDA)
    scale = torch.tensor([1.0, 448 / float(shard.bfloat16().abs().max()), 1e6], device=CUDA)
    for one in scale:
        found = quantise_shard(shard, one, torch.bfloat16)
        expected = quantise_shard(shard.cpu(), one.cpu(), torch.bfloat16)
        assert found.dtype == E4M3
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


RANK_OF_8 = """
import sys, torch
from gpu_engines import CUDA, engine_on
from weft.comm.loopback import loopback_world
with loopback_world(num_ranks=8):
    for gather in ("weights", "float8"):
        engine = engine_on(CUDA, "llama", {
            "mesh": {"dp_shard": 8}, "data_parallel": {"zero": int(sys.argv[1])}, "compile": {"enabled": True},
            "precision": {"preset": "bf16"}, "float8": {"linears": "all", "gather": gather},
        })
        batches = [torch.randint(0, 257, (4, 64), generator=torch.Generator().manual_seed(step)) for step in range(4)]
        print(engine.strategy.num_in_float8, *(engine.step({"input_ids": b, "labels": b}).loss for b in batches))
"""


@pytest.mark.parametrize("zero", [2, 3])
def test_weights_that_travel_in_float8_are_the_same_weights(zero: int) -> None:
    command = [sys.executable, "-c", RANK_OF_8, str(zero)]
    support = Path(__file__).parents[1] / "support"
    done = subprocess.run(command, cwd=support, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()[-2:]
    assert len(lines) == 2, done.stderr[-2000:]
    (none, *whole), (some, *found) = (line.split() for line in lines)
    assert (none, int(some) > 0) == ("0", True)
    assert found == whole


def test_gradients_are_laid_out_as_torch_lays_them_out() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    patch_reduce_scatter_copy("own")
    torch.manual_seed(0)
    gradients = [
        torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in ((64, 33), (8,), (4096, 5), (16, 2, 3))
    ]
    total = sum(gradient.numel() for gradient in gradients)
    for dtype in (torch.float32, torch.bfloat16):
        expected, found = (torch.full((total,), float("nan"), device=CUDA, dtype=dtype) for _ in range(2))
        torch._chunk_cat(gradients, dim=0, num_chunks=8, out=expected.view(8, -1))
        collectives.foreach_reduce_scatter_copy_in(gradients, found, 8)
        assert torch.equal(expected, found)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_step_is_told_to_the_gpu_without_waiting_for_it(zero: int) -> None:
    engine = engine_on(CUDA, "llama", {"data_parallel": {"zero": zero}, "precision": {"preset": "bf16"}, **FAST})
    tokens = torch.randint(0, 257, (512, 64))  # 256 KiB: a copy of less never waits
    batch = {"input_ids": tokens, "labels": tokens}
    engine.step(batch)
    torch.cuda.set_sync_debug_mode("error")  # says what waits
    try:
        pending = engine.step_nowait(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pending.resolve()
    torch.cuda._sleep(4_000_000_000)  # two seconds
    slept = torch.cuda.Event()
    slept.record()
    pending = engine.step_nowait(batch)
    assert not slept.query(), "something in the step waits for the GPU"
    pending.resolve()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_numbers_of_a_step_come_before_the_end_of_the_next(family: str) -> None:
    engine = engine_on(CUDA, family, {"precision": {"preset": "bf16"}, **FAST})
    engine.step(global_batch(0))
    pending = engine.step_nowait(global_batch(1))
    torch.cuda._sleep(4_000_000_000)  # two seconds: the next step
    slept = torch.cuda.Event()
    slept.record()
    pending.resolve()
    assert not slept.query(), "reading a step waits for what was issued after it"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_attention_kernels_are_timed(head_dim: int) -> None:
    shape = Shape(rows=1, heads=16, kv_heads=4, length=2048, head_dim=head_dim, dtype="bfloat16")
    times: dict[str, float] = {}

    def timed(shape: Shape, device: torch.device, name: str) -> float:
        times[name] = attention._seconds(shape, device, name)
        return times[name]

    chosen = attention.fastest(shape, CUDA, seconds=timed)
    assert 0 < times[attention.TORCHS_OWN] < 1
    assert sum(0 < seconds < 1 for seconds in times.values()) >= 2, times
    assert times[chosen] <= times[attention.TORCHS_OWN]


@pytest.mark.parametrize("plan", [FAST, {"compile": {"enabled": False}}], ids=["compiled", "eager"])
def test_bits_repeat_where_verify_compares_them(plan: dict[str, Any], tmp_path: Path) -> None:
    """In processes of their own, each with a compiler that remembers nothing: long rows, whose fused attention does not
    add in a fixed order, and kernels that would be chosen by how fast they were."""
    script = tmp_path / "bits.py"
    script.write_text(_BITS)
    found = set()
    for turn in range(3):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(turn))}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, str(script), json.dumps(plan)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.add(done.stdout.splitlines()[-1])
    assert len(found) == 1, found


_BITS = """
import json, sys
from tiny import FAMILIES, global_batch
from gpu_engines import CUDA, engine_on
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.train.ranks.process import join
from weft.verify.repeatable import repeatable

join(device_type="cuda", timeout_s=60.0)
wide = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024}
FAMILIES["wide"] = ModelSpec(type="llama", config={**FAMILIES["llama"].config, **wide})
tables = {**json.loads(sys.argv[1]), "precision": {"preset": "bf16"}}
found = []
for _ in range(2):
    with repeatable(Plan.from_tables(tables), CUDA) as plan:
        with engine_on(CUDA, "wide", plan.model_dump(mode="json", exclude_none=True)) as engine:
            for step in range(4):
                record = engine.step(global_batch(step, rows=4, length=1024))
                found.append((record.loss, record.grad_norm))
assert found[:4] == found[4:], found
print(found)
"""
