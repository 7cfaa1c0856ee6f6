"""Refusals of [router], and the attached gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from router_engines import FAMILIES
from tiny import build_engine, global_batch

from weft.core.errors import ModelError, NotBuiltError, WeftError
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec, RouterSpec
from weft.engine.activations.recomputing import recomputing
from weft.engine.router.apply import find_and_build
from weft.engine.router.balance import attach, probabilities
from weft.engine.router.sums import add_choices, choices_of, row_size
from weft.engine.wrap_forward import is_wrapped
from weft.models.build import build_config, build_skeleton

CPU = torch.device("cpu")


def built(family: str, spec: RouterSpec, plan: dict[str, Any] | None = None) -> Any:
    config = build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=257)
    return find_and_build(build_skeleton(config), Plan.from_tables(plan or {}), spec, device=CPU)


PIPEDREAM = {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}}


@pytest.mark.parametrize(
    ("family", "spec", "plan", "kind", "says"),
    [
        ("qwen3_moe", RouterSpec(bias_rate=0.1), {}, ModelError, "have no bias"),
        ("qwen3_moe", RouterSpec(z_loss=0.1), PIPEDREAM, NotBuiltError, "needs an update at the end of its step"),
    ],
)
def test_keys_that_do_not_apply_are_refused(
    family: str, spec: RouterSpec, plan: dict[str, Any], kind: type[WeftError], says: str
) -> None:
    with pytest.raises(kind, match=says) as refusal:
        built(family, spec, plan)
    assert refusal.value.hint


def test_a_dense_model_refuses_the_section() -> None:
    with pytest.raises(ModelError, match="it has no experts"):
        build_engine("llama", router=RouterSpec(balance_loss=0.1))


def test_without_keys_loads_are_counted_where_steps_end_together() -> None:
    assert len(built("qwen3_moe", RouterSpec()).experts.layers) == FAMILIES["qwen3_moe"]["num_hidden_layers"]
    assert not built("qwen3_moe", RouterSpec(), PIPEDREAM).experts.layers


def test_all_layers_are_counted_in_one_class_where_nothing_wraps_them() -> None:
    """A forward of its own in each layer would be compiled layer by layer."""
    spec = ModelSpec(type="qwen3_moe", config=FAMILIES["qwen3_moe"])
    engine = build_engine(spec)
    layers = [engine.model.get_submodule(layer.name) for layer in engine.routers.experts.layers]
    assert len({type(layer) for layer in layers}) == 1
    assert not any(is_wrapped(layer) for layer in layers)
    found = engine.step(global_batch(0))
    wrapped = build_engine(spec, router=RouterSpec(balance_loss=1e-9))
    assert is_wrapped(wrapped.model.get_submodule(wrapped.routers.experts.layers[0].name))
    other = wrapped.step(global_batch(0))
    assert found.expert_load == other.expert_load > 1.0
    assert found.expert_entropy == other.expert_entropy


def test_a_recomputed_forward_is_not_counted() -> None:
    row, index = torch.zeros(row_size(4), dtype=torch.float64), torch.tensor([[0, 1], [1, 4]])
    add_choices(row, index, 4)
    with recomputing():
        add_choices(row, index, 4)
    assert choices_of(row, 4).tolist() == [1, 2, 0, 0]


def test_the_term_gets_the_scale_as_its_gradient() -> None:
    carrier, logits = torch.ones(3, requires_grad=True), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    term, scale = (probabilities(logits, "softmax") * torch.arange(4)).sum(), torch.tensor(0.25, dtype=torch.float64)
    attach(carrier, term, scale).sum().backward()
    (expected,) = torch.autograd.grad((probabilities(logits, "softmax") * torch.arange(4)).sum() * 0.25, logits)
    assert carrier.grad is not None
    assert carrier.grad.tolist() == [1, 1, 1]
    assert torch.allclose(logits.grad, expected)  # type: ignore[arg-type]
