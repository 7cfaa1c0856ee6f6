"""Buffers that forwards change, on one process: found, repeated without a trace, saved; and batch norms over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from buffered import Buffered, build, own_buffers, train
from tiny import build_engine, train_steps
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config

from weft.comm.groups import ensure_group
from weft.core.errors import TensorParallelError
from weft.core.plan import Plan
from weft.engine.buffers.batch_norms import _require_all_tokens
from weft.engine.buffers.changes import BufferChanges
from weft.engine.dp.batch_norm import find_batch_norms, span_ranks
from weft.engine.engine import Engine
from weft.models.build import build_skeleton
from weft.models.layout import describe
from weft.models.pp.split import split_model
from weft.models.pretrained import PretrainedWeights


def test_what_changes_is_found_however_it_is_written() -> None:
    engine = build()
    train(engine, 1)
    states = {record.name: record.state for record in engine.buffers()}
    kept = {name.rpartition(".")[2]: state for name, state in states.items() if name.startswith("blocks.0.kept")}
    changes = "changes in the forward, on one rank"
    assert kept == {"mean": changes, "count": changes, "recent": changes, "table": "constant"}
    assert states["norm.num_batches_tracked"] == changes
    assert [record.persistent for record in engine.buffers() if record.name.endswith(("recent", "count"))][:2] == [1, 0]
    assert "batch norms take their statistics over the rows of the batch" in engine.notes[0]


def test_a_model_of_constants_is_not_looked_at_again() -> None:
    engine = build_engine("gpt2")
    train_steps(engine, 2)
    assert engine.buffer_sync.changes.slots == [] or not engine.buffer_sync.changes.changing
    assert {record.state for record in build_engine("llama").buffers()} == {"constant"}


class LateCounter(nn.Module):
    seen: Tensor
    late: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(12, 3), 0
        self.register_buffer("late", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            self.late += 1
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_forward_that_fails_is_followed_by_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are elsewhere: an agreement on buffers would wait for them, and the error would not be seen."""
    engine = build()
    monkeypatch.setattr(engine.buffer_sync, "_look", lambda **_: pytest.fail("looked after an error"))
    monkeypatch.setattr(engine.buffer_sync, "_average", lambda _: pytest.fail("averaged after an error"))
    with pytest.raises(torch.OutOfMemoryError), engine.buffer_sync.forward(0):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_buffer_that_changes_later_is_found_later() -> None:
    engine = build(model=LateCounter())
    train(engine, 1)
    assert engine.buffers()[0].state == "constant"
    train(engine, 1)
    assert engine.buffers()[0].state != "constant"


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("cuts", [1, 4])
def test_a_repeated_forward_finds_the_buffers_of_the_first_and_leaves_them(policy: str, cuts: int) -> None:
    """`Kept` divides by its running size before it changes it: read afterwards it would be another gradient."""
    plain, repeated = (
        build({"pipeline": {"microbatches": cuts}}),
        build({"pipeline": {"microbatches": cuts}, "activations": {"policy": policy}}),
    )
    assert train(plain, 3) == train(repeated, 3)
    found = own_buffers(repeated)
    assert all(torch.equal(value, found[name]) for name, value in own_buffers(plain).items())


def test_a_checkpoint_has_them(tmp_path: Path) -> None:
    engine = build()
    train(engine, 2)
    engine.save(tmp_path)
    right = train(engine, 1, first=2)
    fresh = build()
    fresh.load(tmp_path)
    assert train(fresh, 1, first=2) == right


def test_asking_where_a_model_can_be_cut_leaves_its_buffers_alone() -> None:
    """The walk gives parameters NaN: running statistics of it would be NaN from the start."""
    model = Buffered()
    before = {name: value.clone() for name, value in model.named_buffers()}
    split_model(model, describe(model), num_stages=2)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_stored_buffers_are_loaded_with_the_weights(tmp_path: Path) -> None:
    """The bias by which DeepSeek-V3's router chooses is a buffer: left at zero, other experts are chosen."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "vocab_size": 64, "first_k_dense_replace": 1}
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV3Config(**sizes, **heads, **ranks, **experts)
    stored = AutoModelForCausalLM.from_config(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored.get_buffer(name).copy_(torch.arange(8.0))
    stored.save_pretrained(tmp_path)
    with PretrainedWeights(tmp_path, build_skeleton(config)) as weights:
        engine = Engine(build_skeleton(config), Plan(), weights=weights, device="cpu")
    assert torch.equal(engine.model.get_buffer(name), torch.arange(8.0))


@pytest.mark.parametrize(
    ("make", "shape", "options"),
    [
        (nn.BatchNorm1d, (8, 3), {}),
        (nn.BatchNorm1d, (4, 3, 5), {"momentum": None}),
        (nn.BatchNorm2d, (2, 3, 4, 5), {"affine": False}),
        (nn.BatchNorm3d, (2, 3, 2, 2, 3), {"track_running_stats": False}),
    ],
)
def test_a_batch_norm_over_one_rank_is_torchs(make: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    ensure_group(device_type="cpu")
    torch.manual_seed(0)
    right, spanning = make(shape[1], **options), make(shape[1], **options)
    model = nn.Sequential(spanning)
    group = dist.group.WORLD
    assert group is not None
    span_ranks(model, find_batch_norms(model), group)
    for is_training in (True, True, False):
        right.train(is_training)
        model.train(is_training)
        inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(5)).requires_grad_() for _ in range(2)]
        outputs = [right(inputs[0]), model(inputs[1])]
        for output in outputs:
            (output * torch.linspace(0, 1, output.numel()).view(shape)).sum().backward()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-5)
    for found, expected in zip((*spanning.parameters(),), (*right.parameters(),), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(spanning.named_buffers()), dict(right.named_buffers()), rtol=1e-5, atol=1e-6)


def test_a_batch_norm_keeps_the_format_of_its_input() -> None:
    ensure_group(device_type="cpu")
    model = nn.Sequential(nn.BatchNorm1d(3))
    group = dist.group.WORLD
    assert group is not None
    span_ranks(model, ["0"], group)
    assert model(torch.randn(4, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert model[0].running_mean.dtype == torch.float32


@pytest.mark.parametrize(
    ("tables", "words"), [({"sequence_parallel": True}, "sequence parallel"), ({"mode": "2d"}, "mode '2d'")]
)
def test_a_batch_norm_is_refused_where_ranks_share_out_tokens(tables: dict[str, Any], words: str) -> None:
    plan = Plan.from_tables({"mesh": {"tp": 4}, "tensor_parallel": tables})
    with pytest.raises(TensorParallelError, match=words):
        _require_all_tokens(plan, "blocks.0.norm")


def test_slots_are_those_of_the_whole_model() -> None:
    model = Buffered(num_blocks=2)
    names = [slot.name for slot in BufferChanges(model).slots]
    model.blocks[1].norm._buffers["running_mean"] = None  # type: ignore[index,union-attr]
    assert [slot.name for slot in BufferChanges(model).slots] == names
