"""A recomputed block sends every token to the experts of its first forward, whatever its router computes then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import FAMILIES
from torch import Tensor, nn

import weft.engine.activations.recompute as recompute
from weft.core.memory_sections import Activations
from weft.core.run_spec import ModelSpec
from weft.engine.activations.recompute import apply_recompute
from weft.engine.activations.router_replay import Choices, chooses
from weft.engine.buffers.changes import BufferChanges
from weft.engine.wrap_forward import replace_own
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

# an odd number of experts per token: of one tied pair, one expert is chosen
MIXTRAL = {**FAMILIES["mixtral"].config, "num_experts_per_tok": 3}
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
MODELS = {
    "mixtral": ModelSpec(type="mixtral", config=MIXTRAL),
    # limited to groups of experts, corrected by a bias that only decides the choice
    "deepseek_v3": ModelSpec(type="deepseek_v3", config=DEEPSEEK),
}
ALMOST = 1e-6  # far below what gradients are compared to, far above the distance of tied experts


def model_of(family: str, implementation: str) -> Any:
    config = build_config(MODELS[family], vocab_size=97)
    model: Any = build_skeleton(config)
    layout = describe(model)
    model.to_empty(device="cpu")
    weights = InitialWeights(build_skeleton(config), layout, seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        for name, read in weights.readers(list(layout.unit_of)):
            parameter = model.get_parameter(name)
            parameter.copy_(read(tuple(slice(0, size) for size in parameter.shape)))
        for buffer in (buffer for name, buffer in model.named_buffers() if name.endswith("bias")):
            buffer.zero_()
        for router in routers_of(model):  # tied in pairs: any rounding decides between the two of a pair
            router.weight[1::2] = router.weight[::2]
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.set_experts_implementation(implementation)
    return model.train()


def routers_of(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(".gate")]


@contextmanager
def shaken(model: nn.Module) -> Iterator[None]:
    """Routers that compute other scores while a backward runs, as on a GPU."""
    own = [(router, router.weight.detach().clone()) for router in routers_of(model)]
    for router, weight in own:
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)) * ALMOST
        router.weight.data = weight + noise
    try:
        yield
    finally:
        for router, weight in own:
            router.weight.data = weight


def gradients(family: str, policy: str, implementation: str, *, is_compiled: bool = False) -> dict[str, Tensor]:
    model = model_of(family, implementation)
    for block in model.model.layers if is_compiled else ():
        replace_own(block, lambda own: torch.compile(own, backend="aot_eager", dynamic=False))
    if policy != "none":
        apply_recompute(model, describe(model), Activations(policy=policy), BufferChanges(model))  # type: ignore[arg-type]
    ids = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
    with shaken(model):
        loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def furthest(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    assert expected.keys() == found.keys()
    return max(float((found[name] - right).norm() / right.norm().clamp_min(1e-9)) for name, right in expected.items())


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", MODELS)
def test_a_shaken_router_does_not_choose_again(family: str, implementation: str, policy: str) -> None:
    expected = gradients(family, "none", implementation)
    assert furthest(expected, gradients(family, policy, implementation)) < 100 * ALMOST


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_compiled_blocks_do_not_choose_again() -> None:
    """Both forwards must have one graph: the indices are read when it runs."""
    expected = gradients("mixtral", "none", "grouped_mm")
    assert furthest(expected, gradients("mixtral", "full", "grouped_mm", is_compiled=True)) < 100 * ALMOST


@pytest.mark.parametrize("family", MODELS)
def test_without_replay_gradients_are_of_other_experts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients(family, "none", "grouped_mm")
    monkeypatch.setattr(recompute, "chooses", lambda block: False)
    assert furthest(expected, gradients(family, "full", "grouped_mm")) > 0.05


def test_only_blocks_with_a_top_k_are_watched() -> None:
    config = build_config(FAMILIES["llama"], vocab_size=97)
    dense, experts = build_skeleton(config), build_skeleton(build_config(MODELS["mixtral"], vocab_size=97))
    assert not chooses(dense.get_submodule("model.layers.0"))
    assert chooses(experts.get_submodule("model.layers.0"))


@pytest.mark.parametrize("call", [lambda x: torch.topk(x, 2), lambda x: x.topk(k=2, dim=0), lambda x: x.topk(2, 0)])
def test_values_gradients_and_indices_are_those_of_top_k(call: Any) -> None:
    scores = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    right = call(scores)
    choices = Choices()
    with choices.recorded():
        recorded = call(scores)
    for _ in range(2):  # a backward in halves recomputes twice
        with choices.replayed():
            replayed = call(scores + 0.0)
            assert torch.equal(replayed.indices, right.indices)
    assert recorded.indices.dtype == replayed.indices.dtype == torch.int64
    assert torch.equal(recorded.values, right.values)
    pull = torch.randn_like(right.values)
    expected, found = (torch.autograd.grad((one.values * pull).sum(), scores)[0] for one in (right, replayed))
    assert torch.equal(expected, found)
