"""The hooks on the experts of verify's reference, on families that name the arguments of experts differently."""

from __future__ import annotations

import pytest
import torch
from expert_families import FAMILIES
from transformers import AutoModelForCausalLM

from weft.core.run_spec import ModelSpec
from weft.models.build import build_config
from weft.verify.float8_reference import round_inputs_of_experts
from weft.verify.plain_experts import PlainExperts, plain_experts


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_are_recorded_and_nothing_else_changes(family: str, implementation: str) -> None:
    config = build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=128)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation).train()
    tokens = torch.randint(0, 128, (2, 16))
    plain = model(input_ids=tokens, use_cache=False).logits
    experts = PlainExperts(model, capacity_factor=0.0)
    experts.sequence_length = 16
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, plain)
    choices, drops = experts.take()
    assert choices.keys() == plain_experts(model).keys()
    assert choices
    assert all(len(index) == tokens.numel() for index in choices.values())
    assert not drops

    round_inputs_of_experts(model)
    rounded = model(input_ids=tokens, use_cache=False).logits
    assert not torch.equal(rounded, plain)
    assert torch.allclose(rounded, plain, atol=0.1 * plain.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_drops_over_the_capacity_are_counted(family: str) -> None:
    config = build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=128)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    experts = PlainExperts(model, capacity_factor=0.25)
    experts.sequence_length = 16
    model(input_ids=torch.randint(0, 128, (2, 16)), use_cache=False)
    choices, drops = experts.take()
    assert drops.keys() == choices.keys()
    assert all(0 < drops[name] < index.numel() for name, index in choices.items())
