"""Initial weights follow the model's own rules and need the memory of one unit at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from tiny import CPU, FAMILIES
from tolerances import SAMPLING_SIGMAS
from torch import nn
from transformers import AutoModelForCausalLM

from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton, parameters_on_meta
from weft.models.initial import InitialWeights
from weft.models.layout import ROOT, describe

_WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
# wide enough that a standard deviation is known to a few percent
WIDER: dict[str, ModelSpec] = {
    "llama": ModelSpec(type="llama", config={**_WIDE, "pad_token_id": 3}),
    "qwen3-tied": ModelSpec(type="qwen3", config={**_WIDE, "head_dim": 32, "tie_word_embeddings": True}),
    "gpt2": ModelSpec(type="gpt2", config={"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "mixtral": ModelSpec(type="mixtral", config={**_WIDE, "num_local_experts": 4, "num_key_value_heads": 2}),
}


def drawn(spec: ModelSpec, *, seed: int = 0) -> tuple[dict[str, torch.Tensor], InitialWeights]:
    skeleton = build_skeleton(build_config(spec, vocab_size=257))
    weights = InitialWeights(skeleton, describe(skeleton), seed=seed, device=CPU)
    names = [name for name, _ in skeleton.named_parameters()]
    values = {name: read((slice(None),)).clone() for name, read in weights.readers(names)}
    assert all(parameter.device.type == "meta" for parameter in skeleton.parameters())  # nothing is left behind
    return values, weights


@pytest.mark.parametrize("family", sorted(WIDER))
def test_the_distribution_is_that_of_from_config(family: str) -> None:
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(build_config(WIDER[family], vocab_size=257), dtype=torch.float32)
    values, weights = drawn(WIDER[family])
    assert weights.by_rule == []
    assert values.keys() == dict(reference.named_parameters()).keys()
    for name, expected in reference.named_parameters():
        found, std = values[name], expected.std().item()
        if std == 0.0:
            assert torch.equal(found, expected), name
        else:
            error = SAMPLING_SIGMAS * std * math.sqrt(1 / expected.numel())  # two samples, each std / sqrt(2 n)
            assert found.std().item() == pytest.approx(std, abs=error), name
            assert found.mean().item() == pytest.approx(0.0, abs=error), name


def test_gpt2_scales_the_projections_into_the_residual_stream() -> None:
    values, _ = drawn(WIDER["gpt2"])
    plain = values["transformer.h.0.mlp.c_fc.weight"].std().item()
    for name in ("transformer.h.0.attn.c_proj.weight", "transformer.h.1.mlp.c_proj.weight"):
        error = SAMPLING_SIGMAS * plain / math.sqrt(2 * values[name].numel())
        assert values[name].std().item() == pytest.approx(plain / math.sqrt(2 * 2), abs=error)


def test_the_padding_row_stays_zero() -> None:
    embedding = drawn(WIDER["llama"])[0]["model.embed_tokens.weight"]
    assert not embedding[3].any()
    assert embedding[2].any()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_seed_alone_decides(family: str) -> None:
    first, weights = drawn(FAMILIES[family], seed=1)
    torch.manual_seed(99)  # the caller's generator has no say and is not moved
    state = torch.get_rng_state()
    second, other = drawn(FAMILIES[family], seed=1)[0], drawn(FAMILIES[family], seed=2)[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    random = [name for name in first if first[name].std() > 0]
    assert not any(torch.equal(first[name], other[name]) for name in random)
    assert weights.by_rule == []


def test_two_blocks_do_not_have_the_same_weights() -> None:
    values, _ = drawn(FAMILIES["llama"])
    assert not torch.equal(values["model.layers.0.mlp.up_proj.weight"], values["model.layers.1.mlp.up_proj.weight"])


def test_asking_for_some_parameters_gives_the_same_values_as_asking_for_all() -> None:
    everything, _ = drawn(FAMILIES["qwen3-tied"])
    skeleton = build_skeleton(build_config(FAMILIES["qwen3-tied"], vocab_size=257))
    name = "model.layers.1.mlp.up_proj.weight"
    readers = dict(InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU).readers([name]))
    assert list(readers) == [name]
    assert torch.equal(readers[name]((slice(2, 5), slice(None))), everything[name][2:5])


def test_a_tied_weight_is_drawn_once_by_its_first_owner() -> None:
    """With an untied head of another rule, the second owner's draw would show."""
    tied, _ = drawn(FAMILIES["qwen3-tied"])
    spec = FAMILIES["qwen3-tied"]
    loose = ModelSpec(type=spec.type, config={**spec.config, "tie_word_embeddings": False})
    untied, _ = drawn(loose)
    assert torch.equal(tied["model.embed_tokens.weight"], untied["model.embed_tokens.weight"])
    assert "lm_head.weight" in untied
    assert "lm_head.weight" not in tied


class Odd(nn.Module):
    """A parameter whose value no code sets: torch.empty without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.mystery = nn.Parameter(torch.empty(4, 4))
        self.gain_weight = nn.Parameter(torch.empty(4))
        self.shift = nn.Parameter(torch.empty(4))


@pytest.mark.parametrize(
    ("model_type", "extra", "ending"),
    [
        ("apertus", {}, ("alpha_p", "alpha_n")),  # slopes of its activation, set where they are made
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}, ("bias",)),  # zeros
    ],
)
def test_a_value_given_by_the_constructor_alone_is_kept(
    model_type: str, extra: dict[str, int], ending: tuple[str, ...]
) -> None:
    spec = ModelSpec(type=model_type, config={**_WIDE, "num_key_value_heads": 2, **extra})
    reference = AutoModelForCausalLM.from_config(build_config(spec, vocab_size=257), dtype=torch.float32)
    values, weights = drawn(spec)
    chosen = [name for name in values if name.endswith(ending)]
    assert chosen
    for name in chosen:
        assert torch.equal(values[name], reference.get_parameter(name)), name
    assert weights.by_rule == []


def test_a_parameter_without_a_rule_gets_one_and_is_named() -> None:
    with parameters_on_meta():
        skeleton = Odd()
    layout = describe(skeleton)
    weights = InitialWeights(skeleton, layout, seed=0, device=CPU)
    values = {name: read((slice(None),)).clone() for name, read in weights.readers(list(layout.unit_of))}
    assert sorted(weights.by_rule) == ["gain_weight", "mystery", "shift"]
    assert values["gain_weight"].eq(1).all()
    assert values["shift"].eq(0).all()
    assert values["mystery"].isfinite().all()
    assert values["mystery"].std() > 0
    assert values["layers.0.weight"].abs().max() <= 1 / math.sqrt(8)  # torch's own reset_parameters


def units_alive(weights: InitialWeights, skeleton: nn.Module, names: list[str]) -> Iterator[set[str]]:
    """The units with real memory on the skeleton, at every value handed out."""
    layout = describe(skeleton)
    for _ in weights.readers(names):
        real = {name for name, parameter in skeleton.named_parameters() if parameter.device.type != "meta"}
        yield {layout.unit_of[name] for name in real}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_one_unit_at_a_time_has_memory(family: str) -> None:
    skeleton = build_skeleton(build_config(FAMILIES[family], vocab_size=257))
    names = [name for name, _ in skeleton.named_parameters()]
    weights = InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU)
    alive = list(units_alive(weights, skeleton, names))
    assert len(alive) == len(names)
    assert all(len(units) == 1 for units in alive)
    assert {next(iter(units)) for units in alive} == {*describe(skeleton).blocks, ROOT}


def test_the_owner_that_transformers_keeps_draws_a_tied_weight() -> None:
    """camembert lists its head before its embedding, whose padding row is zeros."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    spec = ModelSpec(type="camembert", config={**sizes, "is_decoder": True})
    skeleton = build_skeleton(build_config(spec, vocab_size=257))
    layout = describe(skeleton)
    values = dict(InitialWeights(skeleton, layout, seed=0, device=torch.device("cpu")).readers(list(layout.unit_of)))
    embedding = values["lm_head.decoder.weight"](())
    assert not embedding[skeleton.config.pad_token_id].any()
    assert embedding[0].all()


def test_what_an_owner_is_part_of_may_draw_its_tied_weight() -> None:
    """modernbert-decoder's embeddings draw their table themselves, cut off at two deviations."""
    spec = ModelSpec(type="modernbert-decoder", config={**_WIDE, "pad_token_id": 0})
    values, _ = drawn(spec)
    table = values["model.embeddings.tok_embeddings.weight"]
    assert 1.5 * 0.02 < table.abs().max() <= 2.001 * 0.02
