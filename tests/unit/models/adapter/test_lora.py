"""Adapters in a model: which layers get one, what they compute, their values, and what is trained."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from adapters import CPU, adapted_run, build_adapted
from tiny import global_batch

from weft.core.errors import AdapterError, BadValueError, NotBuiltError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.models.adapter.build import initial_weights, run_skeleton
from weft.models.adapter.lora import adapted_linears, factor_names
from weft.models.build import build_config
from weft.models.layout import describe
from weft.plan.legality import require_legal


def skeleton(family: str, adapter: dict[str, Any] | None = None) -> Any:
    run = adapted_run(family, adapter)
    return run_skeleton(run, build_config(run.model, vocab_size=257))


def ends(model: Any) -> set[str]:
    return {name.rpartition(".")[2] for name, _ in adapted_linears(model)}


def test_all_linears_of_the_blocks_by_default_without_routers_and_head() -> None:
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert ends(skeleton("llama")) == attention | {"gate_proj", "up_proj", "down_proj"}
    assert ends(skeleton("mixtral")) == attention
    assert ends(skeleton("gpt2")) == {"c_attn", "c_proj", "c_fc"}


def test_targets_by_pattern() -> None:
    assert ends(skeleton("llama", {"targets": ["q_proj", "*.mlp.*_proj"]})) == {
        "q_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    one = skeleton("llama", {"targets": ["model.layers.1.self_attn.v_proj"]})
    assert [name for name, _ in adapted_linears(one)] == ["model.layers.1.self_attn.v_proj"]


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"targets": ["qproj"]}, "no layer matches 'qproj'"),
        ({"targets": ["embed_tokens"]}, "'embed_tokens' matches a Embedding"),
        ({"targets": ["lm_head"]}, "'lm_head' matches a Linear"),
        ({"train_also": ["*.norms.*"]}, "no parameter matches '*.norms.*'"),
    ],
)
def test_wrong_patterns_are_refused(adapter: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError) as error:
        skeleton("llama", adapter)
    assert message in error.value.message
    assert error.value.hint


def test_only_factors_and_train_also_are_trained() -> None:
    model = skeleton("llama", {"train_also": ["*norm.weight"]})
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    norms = {name for name, _ in model.named_parameters() if name.endswith("norm.weight")}
    assert trained == set(factor_names(model)) | norms


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_target_computes_its_merged_weight(family: str) -> None:
    with build_adapted(family, adapter={"rslora": True}) as engine:
        for name, module in adapted_linears(engine.model):
            torch.nn.init.normal_(module.lora_B.weight)
            linear: Any = engine.model.get_submodule(name)
            product = 8 / math.sqrt(4) * module.lora_B.weight @ module.lora_A.weight
            is_transposed = type(linear).__name__ == "Conv1D"
            plain = copy.deepcopy(linear)
            torch.nn.init.zeros_(plain.lora_B.weight)
            with torch.no_grad():
                plain.weight += product.T if is_transposed else product
            x = torch.randn(3, module.lora_A.weight.shape[1])
            torch.testing.assert_close(linear(x), plain(x), rtol=1e-4, atol=1e-4)


def test_initial_values_are_those_of_peft_and_of_the_base_alone() -> None:
    run = adapted_run("llama")
    config, plain = build_config(run.model, vocab_size=257), run.model_copy(update={"adapter": type(run.adapter)()})
    model = run_skeleton(run, config)
    found = dict(initial_weights(run, config, device=CPU).readers(list(describe(model).unit_of)))
    base = dict(initial_weights(plain, config, device=CPU).readers([n for n in found if n not in factor_names(model)]))
    for name, read in base.items():
        assert torch.equal(read(()), found[name](()))
    drawn = set()
    for name in factor_names(model):
        value, bound = found[name](()), 1 / math.sqrt(model.get_parameter(name).shape[1])
        if name.endswith("lora_B.weight"):
            assert not value.any()
        else:  # kaiming uniform with a = sqrt(5)
            assert value.abs().max() <= bound
            assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2)
            drawn.add(float(value.flatten()[0]))
    assert len(drawn) == len(factor_names(model)) // 2  # each its own


def test_frozen_weights_keep_their_bits_and_the_first_loss_is_the_base_s() -> None:
    with build_adapted("llama") as engine:
        before = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
        first = engine.step(global_batch(0)).loss
        moved = {n for n, value in engine.model.named_parameters() if not torch.equal(value, before[n])}
    assert moved == set(factor_names(engine.model))
    from tiny import build_engine

    with build_engine("llama") as plain:
        assert plain.step(global_batch(0)).loss == first


@pytest.mark.parametrize(
    ("plan", "adapter", "what"),
    [
        ({"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}}, {}, "tensor_parallel.mode = '2d'"),
        ({"float8": {"linears": "all"}, "precision": {"preset": "bf16"}}, {}, "float8 products"),
        ({"mesh": {"tp": 2}}, {"dropout": 0.1}, "adapter.dropout with mesh.tp = 2"),
    ],
)
def test_what_it_cannot_combine_with_is_refused(plan: dict[str, Any], adapter: dict[str, Any], what: str) -> None:
    with pytest.raises(NotBuiltError) as error:
        require_legal(Plan.from_tables(plan), adapted_run("llama", adapter))
    assert what in error.value.message
    assert error.value.hint


def test_keys_without_a_kind_are_refused() -> None:
    with pytest.raises(BadValueError, match="need kind = 'lora'"):
        RunSpec.from_tables({"model": {"type": "llama"}, "adapter": {"rank": 4}})


def test_dropout_of_adapters_follows_the_row() -> None:
    """Two micro-batches drop the same elements as one."""
    losses = []
    for count in (1, 2):
        with build_adapted("llama", {"pipeline": {"microbatches": count}}, adapter={"dropout": 0.5}) as engine:
            losses.append([engine.step(global_batch(step)).loss for step in range(4)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    with build_adapted("llama") as engine:
        plain = [engine.step(global_batch(step)).loss for step in range(4)]
    assert max(abs(a - b) for a, b in zip(plain, losses[0], strict=True)) > 1e-4
