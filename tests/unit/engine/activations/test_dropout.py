"""Dropout depends on (seed, step, global row): not on micro-batches, and a replayed forward replays it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import CPU, FAMILIES, build_engine, global_batch, train_steps
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL, SAME_ROW_ABS, SAMPLING_SIGMAS
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.core.errors import NotBuiltError
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.activations.dropout import replayed, seeded_forward, uses_randomness
from weft.engine.engine import Engine
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

ROWS = 8
Forward = Callable[[torch.Tensor], torch.Tensor]


def in_pieces(forward: Forward, rows: torch.Tensor, pieces: int, *, seed: int = 0, step: int = 0) -> torch.Tensor:
    """`forward` over the rows, cut as an engine would cut them."""
    size = rows.shape[0] // pieces
    outputs = []
    for index, part in enumerate(torch.split(rows, size)):
        with seeded_forward(seed=seed, step=step, first_row=index * size, num_rows=size, is_random=True):
            outputs.append(forward(part))
    return torch.cat(outputs)


def gpt2(attention: str) -> nn.Module:
    config = build_config(FAMILIES["gpt2"], vocab_size=257)
    skeleton = build_skeleton(config)
    weights = InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU)
    return Engine(build_skeleton(config, attention=attention), Plan(), weights=weights, device=CPU).model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_rows_hidden_states_do_not_depend_on_the_cut(attention: str) -> None:
    model = gpt2(attention)
    ids = global_batch(0, rows=ROWS)["input_ids"]

    def hidden(rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=rows, use_cache=False, output_hidden_states=True).hidden_states[-1]

    whole = in_pieces(hidden, ids, 1)
    for pieces in (2, 4, ROWS):
        torch.testing.assert_close(in_pieces(hidden, ids, pieces), whole, rtol=0.0, atol=SAME_ROW_ABS)
    for other in (in_pieces(hidden, ids, 1, step=1), in_pieces(hidden, ids, 1, seed=1)):
        assert (other - whole).abs().max() > 100 * SAME_ROW_ABS
    same_row_twice = in_pieces(hidden, ids[:1].repeat(2, 1), 1)
    assert not torch.equal(same_row_twice[0], same_row_twice[1])


def test_attention_dropout_is_really_on_in_both_paths() -> None:
    """The masks of the two paths differ, but each must drop: with the other dropouts off, the output still varies."""
    for attention in ("sdpa", "eager"):
        model = gpt2(attention)
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout) and "attn_dropout" not in name:
                module.p = 0.0
        ids = global_batch(0, rows=2)["input_ids"]
        first, second = (in_pieces(lambda rows: model(rows).logits, ids, 1, step=step) for step in (0, 1))  # noqa: B023
        assert not torch.equal(first, second), attention


@pytest.mark.parametrize("shape", [(ROWS, 5), (ROWS * 4, 3), (ROWS, 2, 3, 3)])
@pytest.mark.parametrize(
    "noise",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: F.dropout(x, 1.0),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: x + torch.rand_like(x),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),  # a router's jitter
        lambda x: torch.empty_like(x).normal_(),
    ],
)
def test_noise_of_any_kind_belongs_to_its_row(noise: Forward, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    whole = in_pieces(noise, x, 1)
    assert whole.shape == x.shape
    for pieces in (2, ROWS):
        assert torch.equal(in_pieces(noise, x, pieces), whole)


@pytest.mark.parametrize("heads_are_flat", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_of_any_shape(heads_are_flat: bool, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS * 2, 4, 8) if heads_are_flat else (ROWS, 2, 4, 8)
    x = torch.randn(shape, generator=generator)
    mask = torch.randn((*shape[:-1], 4), generator=generator) if masked else None

    def attend(rows: torch.Tensor) -> torch.Tensor:
        begin = int((x == rows.flatten()[0]).nonzero()[0][0]) if mask is not None else 0
        part = mask[begin : begin + rows.shape[0]] if mask is not None else None
        return F.scaled_dot_product_attention(rows, rows, rows, part, 0.5)

    whole = in_pieces(attend, x, 1)
    assert whole.shape == x.shape
    for pieces in (2, ROWS):
        torch.testing.assert_close(in_pieces(attend, x, pieces), whole, rtol=0.0, atol=SAME_ROW_ABS)


@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_own_attention_module(need_weights: bool) -> None:
    before = F.dropout, F.scaled_dot_product_attention
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    x = torch.randn(ROWS, 4, 16)

    def attend(rows: torch.Tensor) -> torch.Tensor:
        return attention(rows, rows, rows, need_weights=need_weights)[0]

    assert uses_randomness(attention)
    whole = in_pieces(attend, x, 1)
    for pieces in (2, ROWS):
        torch.testing.assert_close(in_pieces(attend, x, pieces), whole, rtol=0.0, atol=SAME_ROW_ABS)
    assert (F.dropout, F.scaled_dot_product_attention) == before  # torch is left as it was


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_right(p: float) -> None:
    x = torch.ones(4, 50_000)
    out = in_pieces(lambda rows: F.dropout(rows, p), x, 2)
    dropped = (out == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=SAMPLING_SIGMAS * math.sqrt(p * (1 - p) / x.numel()))
    kept = out[out != 0]
    assert torch.equal(kept, torch.full_like(kept, 1 / (1 - p)))


def test_evaluation_drops_nothing() -> None:
    engine = build_engine("gpt2")
    assert uses_randomness(engine.model)
    batch = global_batch(0)
    assert engine.evaluate(batch) == engine.evaluate(batch)
    assert engine.model.training


def test_a_recomputed_block_replays_its_masks() -> None:
    model = gpt2("sdpa")
    batch = global_batch(0, rows=4)

    def gradients(is_recomputed: bool) -> dict[str, torch.Tensor]:
        plain = {name: block.forward for name, block in model.named_modules() if type(block).__name__ == "GPT2Block"}
        for name, forward in plain.items():
            if is_recomputed:
                model.get_submodule(name).forward = _recomputed(forward)  # type: ignore[method-assign]
        with seeded_forward(seed=0, step=0, first_row=0, num_rows=4, is_random=True):
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        for name, forward in plain.items():
            model.get_submodule(name).forward = forward  # type: ignore[method-assign]
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
        model.zero_grad()
        return found

    plain, recomputed = gradients(False), gradients(True)
    assert len(plain) > 10
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_own_attention_module_is_replayed_too(need_weights: bool) -> None:
    """Torch turns modes off inside it: replayed by the mode alone its masks were others in the backward."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    x, found = torch.randn(ROWS, 4, 16), []

    def attend(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(rows, rows, rows, need_weights=need_weights)[0]
        return out

    for is_recomputed in (False, True):
        with seeded_forward(seed=0, step=0, first_row=0, num_rows=ROWS, is_random=True):
            out = (
                checkpoint(attend, x, use_reentrant=False, context_fn=lambda: (nullcontext(), replayed()))
                if is_recomputed
                else attend(x)
            )
        assert isinstance(out, torch.Tensor)
        out.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in attention.parameters() if parameter.grad is not None])
        attention.zero_grad()
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_the_curve_with_dropout_does_not_depend_on_micro_batches() -> None:
    expected = train_steps(build_engine("gpt2"), 4)
    for count in (2, 4):
        found = train_steps(build_engine("gpt2", {"pipeline": {"microbatches": count}}), 4)
        for (loss, norm), (other_loss, other_norm) in zip(expected, found, strict=True):
            assert other_loss == pytest.approx(loss, abs=SAME_CURVE_LOSS_ABS)
            assert other_norm == pytest.approx(norm, rel=SAME_CURVE_NORM_REL)


def test_a_router_with_jitter_trains_alike_in_any_cut() -> None:
    config = build_config(
        ModelSpec(type="mixtral", config={**FAMILIES["mixtral"].config, "router_jitter_noise": 0.3}), vocab_size=257
    )

    def curve(count: int) -> list[float]:
        skeleton = build_skeleton(config)
        weights = InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU)
        plan = Plan.from_tables({"pipeline": {"microbatches": count}})
        engine = Engine(build_skeleton(config), plan, weights=weights, device=CPU)
        return [loss for loss, _ in train_steps(engine, 2)]

    assert uses_randomness(build_skeleton(config))
    assert curve(4) == pytest.approx(curve(1), abs=SAME_CURVE_LOSS_ABS)


def test_what_is_random_is_found() -> None:
    assert uses_randomness(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert not uses_randomness(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert not uses_randomness(build_skeleton(build_config(FAMILIES["llama"], vocab_size=257)))


def test_a_tensor_that_has_no_rows_is_refused() -> None:
    with (
        seeded_forward(seed=0, step=0, first_row=0, num_rows=4, is_random=True),
        pytest.raises(NotBuiltError, match="cannot be assigned to 4 rows"),
    ):
        F.dropout(torch.ones(6, 2), 0.5)
