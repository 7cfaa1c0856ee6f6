"""Dry runs of compiled blocks: what they keep, under recompute too, and what they leave behind in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_peaks import MEASURED, case_of
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import weft.dryrun.compiler as compiler
import weft.engine.kernels.compiled as compiled
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.record import DryRun
from weft.dryrun.run import dry_run

# torch's own tracing asks non-leaf tensors for gradients, and hides that warning only where warnings are no errors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

# A small vocabulary: the blocks need most, not the loss.
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 320}  # fmt: skip


def dried(family: str = "llama", *, config: dict[str, Any] | None = None, **tables: Any) -> DryRun:
    run = RunSpec.from_tables(
        {"model": {"type": family, "config": {**SIZES, **(config or {})}}, "data": {"sequence_length": 256},
         "train": {"global_batch": 16}}
    )  # fmt: skip
    given = {
        "mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}, "precision": {"preset": "bf16"},
        "compile": {"enabled": True}, **tables,
    }  # fmt: skip
    return dry_run(run, Plan.from_tables(given))


@cache
def plain() -> DryRun:
    """The compiled blocks that several tests compare with."""
    return dried()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def kept_bytes() -> list[int]:
    """By one block after its forward, the weights not counted."""
    config = LlamaConfig(**SIZES, attn_implementation="sdpa")
    with default_dtype(torch.bfloat16):
        block, hidden = LlamaDecoderLayer(config, 0), torch.randn(2, 32, 256, requires_grad=True)
    rotary = LlamaRotaryEmbedding(config)(hidden, torch.arange(32)[None])
    own = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compiled._Compiled(block.forward)(hidden, attention_mask=None, position_embeddings=rotary)
    assert out.shape == hidden.shape
    return sorted(found.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_a_block_keeps_what_a_real_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor by tensor, beside torch's own cut of a block with values. Fails when a private name of it moves."""
    with compiler.compiler_without_code(), FakeTensorMode():
        foreseen = kept_bytes()
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager_decomp_partition")
    assert foreseen == kept_bytes()


def test_recompute_keeps_less_than_compiled_blocks_do() -> None:
    none, full = plain(), dried(activations={"policy": "full"})
    assert full.peak_bytes < none.peak_bytes
    assert none.notes == ()


@pytest.mark.slow
def test_blocks_of_a_mixture_keep_what_lies_between() -> None:
    none, half, full = (
        dried(activations=activations, config={"num_hidden_layers": 4})
        for activations in ({"policy": "none"}, {"policy": "budget", "mixture": [2, 0]}, {"policy": "full"})
    )
    assert full.peak_bytes < half.peak_bytes < none.peak_bytes


@pytest.mark.slow
def test_attention_stays_that_of_the_gpu() -> None:
    holders = [holder for holder in dried().peak.largest if holder.term == "activations"]
    assert "aten._scaled_dot_product_cudnn_attention" in {holder.operator for holder in holders}
    assert {holder.module for holder in holders} == {"model.layers.*"}


def test_what_is_computed_is_counted_as_without_a_compiler() -> None:
    eager, found = dried(compile={"enabled": False}), plain()
    assert found.flops == eager.flops
    assert found.traffic == eager.traffic
    assert found.terms["activations"] < 0.8 * eager.terms["activations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config", "tables"),
    [
        ("mixtral", {"num_local_experts": 4}, {}),
        ("gemma2", {"head_dim": 64}, {"precision": {"preset": "fp32"}}),
        ("llama", {}, {"float8": {"linears": "all"}}),
        ("llama", {}, {"mesh": {"pp": 2}, "data_parallel": {"zero": 0}, "pipeline": {"microbatches": 4}}),
    ],
)
def test_it_needs_less_than_eager_blocks(family: str, config: dict[str, Any], tables: dict[str, Any]) -> None:
    found = dried(family, config=config, **tables)
    eager = dried(family, config=config, **tables, compile={"enabled": False})
    assert found.peak_bytes < eager.peak_bytes
    assert found.notes == eager.notes


@pytest.mark.parametrize("mesh", [pytest.param({"dp_shard": 2}, marks=pytest.mark.extended), {"dp_shard": 2, "ep": 2}])
def test_graphs_that_count_choices_of_experts_are_followed(mesh: dict[str, int]) -> None:
    """An operator that writes into its input: the estimate of selective recompute stood for them, and was 12% low."""
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
    found = dried("qwen3_moe", config=config, mesh=mesh)
    assert not any("cannot compile" in note for note in found.notes)


@pytest.mark.slow
def test_a_model_with_dropout_is_not_compiled() -> None:
    drops = {"attention_dropout": 0.1}
    assert dried(config=drops).terms == dried(config=drops, compile={"enabled": False}).terms


@pytest.mark.parametrize(
    "tables",
    [
        {},
        pytest.param(
            {"mesh": {"pp": 2}, "data_parallel": {"zero": 0}, "pipeline": {"microbatches": 4}}, marks=pytest.mark.slow
        ),
    ],
)
def test_where_the_compiler_cannot_follow_selective_recompute_stands_for_it(
    monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("nobody knows this operator")

    monkeypatch.setattr("weft.dryrun.fusion.kernels_of", refuse)
    found = dried(**tables)
    assert "cannot compile" in found.notes[-1]
    assert "nobody knows this operator" in found.notes[-1]
    eager = {**tables, "compile": {"enabled": False}}
    assert found.terms == dried(**eager, activations={"policy": "selective"}).terms


@pytest.mark.slow
def test_what_stands_for_it_is_computed_again_where_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.dryrun.fusion.kernels_of", lambda _graph: 1 / 0)
    for policy, mixture, eager in (("full", None, None), ("budget", [1, 0], [1, 1])):
        found = dried(activations={"policy": policy, "mixture": mixture})
        expected = dried(activations={"policy": policy, "mixture": eager}, compile={"enabled": False})
        assert found.terms == expected.terms


@pytest.mark.slow
def test_nothing_compiled_is_left_behind() -> None:
    """Neither for the next dry run nor for code that is compiled for real."""
    first = dried()
    dried(precision={"preset": "fp32"})
    assert dried().terms == first.terms
    assert compiled.BACKEND == "inductor"
    called: list[Any] = []

    def note(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        called.extend(node.target for node in module.graph.nodes)
        return module

    query = torch.randn(1, 2, 8, 4)
    attend = torch.compile(lambda query: F.scaled_dot_product_attention(query, query, query), backend=note)
    assert torch.equal(attend(query), F.scaled_dot_product_attention(query, query, query))
    assert F.scaled_dot_product_attention in called


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_a_peak_is_the_one_an_h200_had(name: str) -> None:
    assert dry_run(*case_of(name)).peak_bytes == pytest.approx(MEASURED[name], rel=1e-3)
