"""Where tensor parallelism shards: exact layouts of families built differently, and invariants of every layout.

The strongest test is the last: a layout is carried out on two ranks that are threads (thread_ranks), and the logits and
every gradient are those of the full model.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
from meta_models import RefusedError, draw
from thread_ranks import differences, give_values
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.core.errors import WeftError
from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.models.tp.checks import wrong_arithmetic
from weft.models.tp.finder import find_tensor_layout
from weft.models.tp.layout import LinearShards, Region, Segment, TensorLayout
from weft.models.tp.reasons import sharded_parameters

_BASE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_MOE = {**_GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_OLD = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 32},
    "mistral": _GROUPED,
    "gemma2": {**_GROUPED, "head_dim": 16},
    "gemma3_text": {**_GROUPED, "head_dim": 16},
    "phi3": _GROUPED,
    "gpt2": {**_OLD, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": _BASE,
    "olmo2": _GROUPED,
    "granite": _GROUPED,
    "cohere": {**_GROUPED, "use_qk_norm": True},
    "stablelm": _GROUPED,
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "qwen3_moe": {**_MOE, "num_experts": 4},
    "deepseek_v3": {**_MOE, **_LATENT},
    "gpt_oss": {**_GROUPED, "head_dim": 16, "num_local_experts": 4},
    "opt": {**_OLD, "hidden_size": 64, "word_embed_proj_dim": 32, "ffn_dim": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4},
    "bloom": {**_OLD, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {**_OLD, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mamba": {**_OLD, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "bert": {**_BASE, "is_decoder": True},
}  # fmt: skip


def built(model_type: str, **overrides: Any) -> nn.Module:
    config = {**CONFIGS.get(model_type, {}), **overrides}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_skeleton(build_config(ModelSpec(type=model_type, config=config), vocab_size=320))


def found(model_type: str, **overrides: Any) -> TensorLayout:
    model = built(model_type, **overrides)
    return find_tensor_layout(model, describe(model))


def region(layout: TensorLayout, kind: str, index: int = 0) -> Region:
    return [one for one in layout.regions if one.kind == kind][index]


def outputs(region: Region) -> dict[str, tuple[tuple[int, int, bool], ...]]:
    """Column linears by last name -> (units, size, may repeat) of each segment."""
    return {
        linear.name.rpartition(".")[2]: tuple((one.units, one.size, one.may_repeat) for one in linear.outputs)
        for linear in region.linears
        if linear.side == "column"
    }


def row(region: Region) -> LinearShards:
    (linear,) = (linear for linear in region.linears if linear.side == "row")
    return linear


def reasons(layout: TensorLayout, word: str) -> set[str]:
    return {why for name, why in layout.replicated.items() if word in name}


def test_llama_is_cut_everywhere_but_in_its_norms() -> None:
    layout = found("llama")
    assert [(one.kind, one.name) for one in layout.regions] == [
        (kind, f"model.layers.{index}.{name}")
        for index in range(2)
        for kind, name in (("attention", "self_attn"), ("mlp", "mlp"))
    ]
    attention = region(layout, "attention")
    assert attention.entries == ("model.layers.0.self_attn",)
    assert outputs(attention) == {"q_proj": ((4, 16, False),), "k_proj": ((2, 16, True),), "v_proj": ((2, 16, True),)}
    assert row(attention).inputs == (Segment(units=4, size=16),)
    assert attention.attributes == {"num_key_value_groups": "heads_per_kv"}
    assert outputs(region(layout, "mlp")) == {"gate_proj": ((96, 1, False),), "up_proj": ((96, 1, False),)}
    assert (layout.embedding, layout.head, layout.hidden_size) == ("model.embed_tokens", "lm_head", 64)
    assert set(layout.replicated.values()) == {"a norm"}
    assert [name.partition("layers.")[2] for name in layout.norms] == [
        "0.input_layernorm", "0.post_attention_layernorm", "1.input_layernorm", "1.post_attention_layernorm", "",
    ]  # fmt: skip
    assert (layout.mixers, layout.refusals) == ((), {})


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "granite", "stablelm"])
def test_families_like_llama(model_type: str) -> None:
    layout = found(model_type)
    assert [one.kind for one in layout.regions] == ["attention", "mlp"] * 2
    assert outputs(region(layout, "attention"))["k_proj"] == ((2, 16, True),)
    assert set(layout.replicated.values()) == {"a norm"}
    assert layout.refusals == {}


def test_a_norm_of_one_head_is_whole_and_its_gradient_partial() -> None:
    for model_type, size in (("qwen3", 32), ("gemma3_text", 16)):
        attention = region(found(model_type), "attention")
        assert outputs(attention)["q_proj"] == ((4, size, False),)
        assert [name.rpartition("self_attn.")[2] for name in attention.partial] == ["q_norm.weight", "k_norm.weight"]
        assert attention.wide_norms == ()


def test_norms_over_all_heads_span_the_ranks() -> None:
    attention = region(found("olmo2"), "attention")
    assert {norm.name.rpartition(".")[2]: norm.segments for norm in attention.wide_norms} == {
        "q_norm": (Segment(units=4, size=16),),
        "k_norm": (Segment(units=2, size=16, may_repeat=True),),
    }


def test_a_norm_with_a_row_for_each_head_is_cut_by_heads() -> None:
    attention = region(found("cohere"), "attention")
    assert {one.name.rpartition("self_attn.")[2]: (one.dim, one.segments) for one in attention.tensors} == {
        "q_norm.weight": (0, (Segment(units=4),)),
        "k_norm.weight": (0, (Segment(units=2, may_repeat=True),)),
    }


def test_norms_in_a_list_of_heads_keep_attention_whole() -> None:
    layout = found("stablelm", qk_layernorm=True)
    assert {one.kind for one in layout.regions} == {"mlp"}
    assert layout.mixers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert reasons(layout, "q_proj") == {
        "attention that weft does not shard: its q_layernorm.norms.0.weight is not recognised"
    }


def test_fused_projections_are_cut_by_part_or_by_head() -> None:
    phi3, gpt2, neox = found("phi3"), found("gpt2"), found("gpt_neox")
    assert outputs(region(phi3, "attention")) == {"qkv_proj": ((4, 16, False), (2, 16, True), (2, 16, True))}
    assert outputs(region(phi3, "mlp")) == {"gate_up_proj": ((96, 1, False), (96, 1, False))}
    assert region(phi3, "attention").attributes["config.num_attention_heads"] == "heads"
    assert outputs(region(gpt2, "attention")) == {"c_attn": ((4, 16, False), (4, 16, True), (4, 16, True))}
    assert region(gpt2, "attention").attributes == {"num_heads": "heads", "split_size": "width"}
    assert all(linear.is_transposed for linear in region(gpt2, "mlp").linears)
    assert outputs(region(neox, "attention")) == {"query_key_value": ((4, 48, False),)}
    assert reasons(neox, "attention.dense.bias") == {"a bias added once, after the sum over ranks"}


def test_falcon_in_its_three_orders() -> None:
    many = found("falcon", num_attention_heads=4)
    assert outputs(region(many, "attention")) == {"query_key_value": ((4, 16, False), (1, 16, True), (1, 16, True))}
    grouped = region(found("falcon", new_decoder_architecture=True, num_kv_heads=2), "attention")
    assert outputs(grouped) == {"query_key_value": ((2, 64, False),)}
    assert row(grouped).inputs == (Segment(units=2, size=32),)
    assert grouped.kv_heads == Segment(units=2, size=16)  # one projection: no rank can have a key without its queries
    heads = region(found("falcon", multi_query=False, num_kv_heads=4), "attention")
    assert outputs(heads) == {"query_key_value": ((4, 48, False),)}
    alibi = found("falcon", alibi=True)
    assert reasons(alibi, "query_key_value") == {"attention that weft does not shard: its ALiBi covers all heads"}


def test_experts_are_cut_by_width_and_the_router_is_whole() -> None:
    for model_type, width in (("mixtral", 96), ("qwen3_moe", 32)):
        layout = found(model_type)
        experts = region(layout, "experts")
        assert (experts.entries, experts.leaves_at) == ((experts.name,), experts.name)
        assert [(one.name.rpartition(".")[2], one.dim, len(one.segments)) for one in experts.tensors] == [
            ("gate_up_proj", 1, 2), ("down_proj", 2, 1),
        ]  # fmt: skip
        assert {segment.units for one in experts.tensors for segment in one.segments} == {width}
        assert reasons(layout, "mlp.gate.weight") == {"the router"}
        assert layout.refusals == {"grid": "experts are not sharded on grids"}


def test_latent_attention_cuts_what_leaves_the_latents() -> None:
    attention = region(found("deepseek_v3"), "attention")
    assert outputs(attention) == {"q_b_proj": ((4, 24, False),), "kv_b_proj": ((4, 48, False),)}
    assert row(attention).inputs == (Segment(units=4, size=32),)
    assert {name.split(".")[-2] for name in attention.partial} == {
        "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm",
    }  # fmt: skip
    kinds = [one.kind for one in found("deepseek_v3").regions]
    assert kinds == ["attention", "mlp", "attention", "experts", "mlp"]


def test_sinks_are_cut_and_experts_with_a_bias_stay_whole() -> None:
    layout = found("gpt_oss")
    assert {one.kind for one in layout.regions} == {"attention"}
    assert region(layout, "attention").tensors[0].segments == (Segment(units=4),)
    assert reasons(layout, "experts.down_proj") == {
        "experts that weft does not shard: its gate_up_proj_bias would be added once per rank"
    }


def test_linears_that_hang_in_the_block() -> None:
    layout = found("opt")
    mlp = region(layout, "mlp")
    assert (mlp.name, mlp.entries) == ("model.decoder.layers.0", ("model.decoder.layers.0.fc1",))
    assert [linear.name.rpartition(".")[2] for linear in mlp.linears] == ["fc1", "fc2"]
    assert layout.embedding == "model.decoder.embed_tokens"
    assert reasons(layout, "embed_positions") == {"an embedding of something other than tokens"}
    bert = found("bert")
    assert region(bert, "attention").entries == ("bert.encoder.layer.0.attention.self",)
    assert row(region(bert, "attention")).name == "bert.encoder.layer.0.attention.output.dense"
    assert (bert.embedding, bert.head) == (None, None)
    assert "another module shares its bias" in next(iter(reasons(bert, "word_embeddings")))


def test_alibi_keeps_attention_whole_and_a_residual_moves_the_entry() -> None:
    layout = found("bloom")
    assert {one.kind for one in layout.regions} == {"mlp"}
    assert region(layout, "mlp").entries == ("transformer.h.0.mlp.dense_h_to_4h",)
    assert layout.mixers == ("transformer.h.0.self_attention", "transformer.h.1.self_attention")
    assert reasons(layout, "query_key_value") == {"attention that weft does not shard: its ALiBi covers all heads"}
    assert layout.refusals == {"grid": "transformer.h.0.self_attention is replicated"}


def test_mamba_is_whole_but_for_its_ends() -> None:
    layout = found("mamba")
    assert layout.regions == ()
    assert layout.mixers == ("backbone.layers.0.mixer", "backbone.layers.1.mixer")
    assert (layout.embedding, layout.head) == ("backbone.embeddings", "lm_head")
    assert reasons(layout, "in_proj") == {"part of a MambaMixer, which weft does not shard"}
    assert layout.refusals["grid"] == "no part of the model is sharded"


def test_a_family_that_was_not_compared_stays_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.zoo.tensor_exceptions.COMPARED", frozenset())
    assert found("gpt2").regions == ()
    assert found("llama").regions != ()  # its config has a plan


def test_layers_that_share_keys_keep_all_attention_replicated() -> None:
    """Sharding the layer of the keys would pass a slice to a replicated one."""
    types = ["sliding_attention", "full_attention"] * 2
    config = {**_GROUPED, "num_hidden_layers": 4, "layer_types": types, "num_kv_shared_layers": 2, "head_dim": 16}
    layout = found("gemma4_text", **config, vocab_size_per_layer_input=320)
    assert {one.kind for one in layout.regions} == {"mlp"}
    assert "sequence_parallel" in layout.refusals


def test_what_a_layout_rules_out() -> None:
    experts = found("llama4_text", **_GROUPED, head_dim=16, num_local_experts=4, intermediate_size_mlp=96)
    assert "does not take top_k_index" in experts.refusals["sequence_parallel"]
    assert "also take per_layer_input" in found("gemma4_text", **_GROUPED, head_dim=16).refusals["sequence_parallel"]
    assert "q_a_proj.weight is neither" in found("minicpm3", **_BASE, num_key_value_heads=4).refusals["grid"]
    assert "another module shares its bias" in found("bert").refusals["loss_parallel"]


def test_an_unknown_parameter_keeps_a_module_replicated() -> None:
    model = built("llama")
    model.get_submodule("model.layers.1.mlp").register_parameter(
        "scale", nn.Parameter(model.lm_head.weight.new_ones(3))
    )
    model.get_submodule("model.layers.0.self_attn").register_buffer("slopes", model.lm_head.weight.new_ones(4))
    layout = find_tensor_layout(model, describe(model))
    assert [one.name for one in layout.regions] == [
        "model.layers.0.mlp"
    ]  # attention is sharded in all layers or in none
    assert "its scale is not recognised" in layout.replicated["model.layers.1.mlp.up_proj.weight"]
    assert "its buffer slopes" in layout.replicated["model.layers.0.self_attn.q_proj.weight"]


def test_arithmetic_that_does_not_hold_is_no_region() -> None:
    model = built("llama")
    attention = region(find_tensor_layout(model, describe(model)), "attention")
    wrong = Region(**{**vars(attention), "linears": (*attention.linears[:-1], attention.linears[0])})
    assert wrong_arithmetic(attention, model, hidden_size=64) is None
    assert wrong_arithmetic(wrong, model, hidden_size=64) == "it does not end in one projection to the hidden size"
    model.get_submodule("model.layers.0.self_attn").num_heads = 8
    assert "its num_heads is 8" in next(iter(reasons(find_tensor_layout(model, describe(model)), "0.self_attn")))


def judge(model: nn.Module) -> TensorLayout:
    """Every parameter is sharded exactly once or replicated with a reason; every region adds up."""
    layout = find_tensor_layout(model, describe(model))
    sharded = sharded_parameters(layout, model)
    names = {name for name, _ in model.named_parameters()}
    assert set(sharded) | set(layout.replicated) == names
    assert not set(sharded) & set(layout.replicated)
    assert all(layout.replicated.values())
    assert {name for one in layout.regions for name in one.partial} <= set(layout.replicated)
    for one in layout.regions:
        assert wrong_arithmetic(one, model, hidden_size=layout.hidden_size) is None
    return layout


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_every_parameter_is_cut_once_or_has_a_reason(model_type: str) -> None:
    judge(built(model_type))


_HYBRID = {**_MOE, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32,
           "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("olmo2", {}),
        ("cohere", {}),
        ("gpt2", {}),
        ("falcon", {}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
        ("falcon", {"multi_query": False, "num_kv_heads": 4}),
        ("qwen3_moe", {}),
        ("qwen3_next", _HYBRID),
        ("deepseek_v3", {}),
        ("bert", {}),
        ("bloom", {}),
    ],
)
def test_two_ranks_give_what_one_gives(model_type: str, overrides: dict[str, Any]) -> None:
    model = built(model_type, **overrides)
    layout = find_tensor_layout(model, describe(model))
    assert layout.regions
    assert differences(give_values(model), layout) == []


def test_four_ranks_share_two_key_value_heads() -> None:
    model = built("olmo2")
    assert differences(give_values(model), find_tensor_layout(model, describe(model)), size=4) == []


def test_a_wrong_layout_is_noticed() -> None:
    """The judge itself: a fused projection sharded in another order gives other logits."""
    model = give_values(built("gpt_neox"))
    layout = find_tensor_layout(model, describe(model))
    for one in layout.regions:
        if one.kind == "attention":
            one.linears[0].__dict__["outputs"] = (Segment(units=4, size=16),) * 3
    assert differences(model, layout)[0].startswith("logits")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_type_of_transformers(model_type: str) -> None:
    """Two draws of sizes and flags: the layout is complete; where heads divide, two ranks give what one gives."""
    rng, judged, reason, is_built = random.Random(model_type), 0, "", False
    for attempt in range(6):
        try:
            model = built(model_type, **_drawn(model_type, rng, flags=attempt > 0))
        except (WeftError, KeyError, RefusedError) as error:
            reason = str(error)
            continue
        is_built = True
        layout = judge(model)
        judged += _compare(model, layout)
        if judged == 2:
            return
    if not is_built:
        pytest.skip(f"no draw of sizes was built: {reason}")


def _drawn(model_type: str, rng: random.Random, *, flags: bool) -> dict[str, Any]:
    sizes = draw(model_type, rng, flags=flags)
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return sizes


def _compare(model: nn.Module, layout: TensorLayout) -> bool:
    """Whether this draw is done with; one that does not run whole, or does not divide, says nothing."""
    if sum(parameter.numel() for parameter in model.parameters()) > 60_000_000:
        return True  # nested configs are not drawn small: the layout was judged, values would take too long
    try:
        whole = differences(give_values(model), TensorLayout(**{**vars(layout), "regions": (), "embedding": None,
                                                              "head": None}), size=1)  # fmt: skip
    except Exception:  # a draw that transformers builds and cannot run
        return False
    assert whole == []
    try:
        assert differences(model, layout) == []
    except ValueError as error:  # three key-value heads on two ranks
        if "ranks" not in str(error):
            raise
        return False
    return True
