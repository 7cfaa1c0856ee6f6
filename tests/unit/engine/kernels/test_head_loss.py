"""Head and loss as one: the numbers of logits that are whole, whatever a model does to them, and nothing kept whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import CPU, FAMILIES, build_engine, global_batch
from tolerances import BF16_SAME_LOSS_ABS, SAME_STEP_REL
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft.engine.kernels.head_loss as head_loss
from weft.core.errors import NotBuiltError
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.kernels.fast_path import fast_path
from weft.engine.kernels.head_loss import LazyLogits, find_head, token_chunks
from weft.engine.objective import token_loss_sum
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

FUSED = {"kernels": {"loss": "fused"}}
CAPPED = {**FAMILIES["llama"].config, "num_hidden_layers": 2}
MODELS = {
    **{name: FAMILIES[name] for name in ("llama", "qwen3-tied", "gpt2", "mixtral")},
    "gemma2": ModelSpec(
        type="gemma2", config={**CAPPED, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}
    ),
    "cohere": ModelSpec(type="cohere", config={**CAPPED, "logit_scale": 0.5}),
    "granite": ModelSpec(type="granite", config={**CAPPED, "logits_scaling": 3.0}),
    "gptj": ModelSpec(type="gptj", config={"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),  # a biased head
}


def engine_of(family: str, tables: dict[str, Any]) -> Engine:
    config = build_config(MODELS[family], vocab_size=257)
    skeleton = build_skeleton(config)
    weights = InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU)
    return Engine(build_skeleton(config), Plan.from_tables(tables), weights=weights, device=CPU)


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "CHUNK_ELEMENTS", 320 * 70)  # several for the batches here


@pytest.mark.parametrize("family", sorted(MODELS))
def test_the_losses_norms_and_evaluations_are_those_of_whole_logits(family: str) -> None:
    whole, fused = engine_of(family, {}), engine_of(family, FUSED)
    for step in range(3):
        first, second = whole.step(global_batch(step)), fused.step(global_batch(step))
        assert second.loss == pytest.approx(first.loss, rel=SAME_STEP_REL)
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=SAME_STEP_REL * 50)
    assert fused.evaluate(global_batch(9)).loss == pytest.approx(
        whole.evaluate(global_batch(9)).loss, rel=SAME_STEP_REL
    )
    (technique,) = [row for row in fast_path(fused) if row.technique == "fused head and loss"]
    assert technique.on, technique.why


@pytest.mark.parametrize("zero", [0, 3])
def test_in_bfloat16_it_stays_within_its_roundings(zero: int) -> None:
    tables = {"precision": {"preset": "bf16"}, "data_parallel": {"zero": zero}}
    whole, fused = engine_of("llama", tables), engine_of("llama", {**tables, **FUSED})
    for step in range(4):
        assert abs(whole.step(global_batch(step)).loss - fused.step(global_batch(step)).loss) <= BF16_SAME_LOSS_ABS


class MixedProducts(TorchDispatchMode):
    """Products of a low tensor with a float32 scalar tensor. A GPU rounds the scalar to the tensor's format, a CPU
    does not: it would be wrong there alone, by up to 0.4%, in every element alike."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs or {})) if isinstance(value, torch.Tensor)]
        floats = [value for value in tensors if value.is_floating_point()]
        scalars, others = (
            {value.dtype for value in floats if (value.ndim == 0) == is_scalar} for is_scalar in (True, False)
        )
        if any(word in str(func) for word in ("mul", "div")) and others and scalars - others:
            self.found.append(f"{func} of {others} by {scalars}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tables", [{}, {"data_parallel": {"zero": 3}}, {"precision": {"master_weights": "bfloat16"}}])
def test_nothing_is_scaled_by_what_a_gpu_would_round_first(tables: dict[str, Any]) -> None:
    precision = {"preset": "bf16", **tables.get("precision", {})}
    engine = engine_of("llama", {**tables, **FUSED, "precision": precision})
    batch = global_batch(0)
    batch["labels"][0, ::2] = -100  # a number of labels whose inverse no low format has
    with MixedProducts() as products:
        engine.step(batch)
    assert products.found == []


def test_every_gradient_is_that_of_whole_logits() -> None:
    seen: list[dict[str, torch.Tensor]] = []
    for tables in ({}, FUSED):
        engine = engine_of("gemma2", {**tables, "pipeline": {"microbatches": 2}})
        engine.on_gradients = lambda found: seen.append({name: value.clone() for name, value in found.items()})
        batch = global_batch(0)
        batch["labels"][:, :3] = -100
        engine.step(batch)
    for name, gradient in seen[0].items():
        assert torch.allclose(gradient, seen[1][name], rtol=1e-4, atol=1e-7), name


def test_no_logits_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_at_once: list[int] = []
    take_loss = head_loss.cross_entropy_

    def seen(logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        rows_at_once.append(logits.shape[0])
        return take_loss(logits, *args, **options)

    monkeypatch.setattr(head_loss, "cross_entropy_", seen)
    monkeypatch.setattr("weft.engine.objective.token_loss_sum", None)
    monkeypatch.setattr(head_loss, "token_loss_sum", None)
    engine_of("llama", FUSED).step(global_batch(0))
    rows = global_batch(0)["labels"].numel()
    assert sum(rows_at_once) == rows
    assert max(rows_at_once) <= 70 < rows


def late(rows: int = 6) -> tuple[LazyLogits, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, rows, 4), torch.randn(9, 4)
    return LazyLogits(hidden, weight, None), F.linear(hidden, weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits,
        lambda logits: logits * 2,
        lambda logits: 0.5 * logits,
        lambda logits: (logits / 3.0).tanh() * 3.0,
        lambda logits: torch.tanh(logits.float() / 3.0).mul(3),
        lambda logits: logits.to(torch.float32).contiguous(),
    ],
)
def test_what_is_foreseen_stays_late(change: Any) -> None:
    logits, tensor = late()
    labels = torch.tensor([[1, 2, -100, 0, 8, 3]])
    changed = change(logits)
    assert isinstance(changed, LazyLogits)
    assert not changed.asked
    assert changed.loss_sum(labels).item() == pytest.approx(token_loss_sum(change(tensor), labels).item(), rel=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits + torch.ones(9),
        lambda logits: torch.exp(logits),
        lambda logits: logits[..., :5, :],
        lambda logits: torch.cat([logits, logits], dim=1),
        lambda logits: logits * torch.full((), 2.0),
        lambda logits: logits + 1.0,
        lambda logits: 1.0 - logits,
        lambda logits: logits.softmax(dim=-1),
    ],
)
def test_anything_else_happens_to_the_whole_tensor(change: Any) -> None:
    logits, tensor = late()
    assert torch.allclose(change(logits), change(tensor))
    assert logits.asked


def test_what_is_written_into_them_counts() -> None:
    logits, tensor = late()
    logits.mul_(3.0)
    logits[..., 4] = -1e4
    tensor = tensor * 3.0
    tensor[..., 4] = -1e4
    labels = torch.tensor([[1, 2, 3, 0, 8, 3]])
    assert logits.loss_sum(labels).item() == pytest.approx(token_loss_sum(tensor, labels).item())


@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (64, 320), (1000, 320), (129, 22400), (5, 10**6)])
def test_stretches_cover_every_row_once(rows: int, vocab: int) -> None:
    found = token_chunks(rows, vocab)
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(rows))
    sizes = [part.stop - part.start for part in found]
    assert max(sizes) * vocab <= max(head_loss.CHUNK_ELEMENTS, 64 * vocab)


def test_a_model_without_such_a_head_says_so() -> None:
    assert find_head(nn.Linear(2, 2)) == (None, "the model has no output embeddings")


def test_layouts_that_cut_the_head_on_a_grid_are_refused() -> None:
    with pytest.raises(NotBuiltError, match=r"fused loss .* tensor_parallel.mode = '2d'"):
        build_engine("llama", {**FUSED, "mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}})


def test_what_asked_for_whole_logits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what the model gives back is a plain tensor then."""
    engine = engine_of("llama", FUSED)
    right = engine.evaluate(global_batch(0)).loss
    own = type(engine.model).forward

    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output.logits = output.logits + 0.0
        return output

    monkeypatch.setattr(engine.model.forward, "own", reading.__get__(engine.model))
    assert engine.evaluate(global_batch(0)).loss == pytest.approx(right, rel=SAME_STEP_REL)
    (technique,) = [row for row in fast_path(engine) if row.technique == "fused head and loss"]
    assert (technique.on, technique.why) == (False, "the model's code needs the full logits: add")
