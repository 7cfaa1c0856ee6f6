"""Muon's numbers are torch's; whole matrices come together from shards of any kind and their updates go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import build_engine, global_batch, train_steps
from torch import nn

from weft.core.muon import newton_schulz_flops, order_key, rate_scale
from weft.core.optimizers import OptimizerKind
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.shards import Span, local_shard
from weft.engine.optim.matrix_owners import MatrixOwners, pieces_of
from weft.engine.optim.muon import Muon
from weft.engine.optim.newton_schulz import orthogonalised
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.matrices import matrix_names
from weft.plan.ask import ask
from weft.plan.estimate import estimate

MUON = OptimizerPolicy(kind="muon", learning_rate=1e-2, muon_precision="bfloat16")
MATRIX = "model.layers.0.mlp.down_proj.weight"
STEPS = 3


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_a_matrix_has_the_bits_of_torchs_muon(scale: Any) -> None:
    engine = build_engine("llama", optimizer=OptimizerPolicy(**{**vars(MUON), "muon_scale": scale}), clip_norm=0.0)
    own = dict(engine.model.named_parameters())[MATRIX]
    other = nn.Parameter(own.detach().clone())
    right = torch.optim.Muon([other], lr=1e-2, weight_decay=0.1, adjust_lr_fn=scale)
    engine.on_gradients = lambda gradients: setattr(other, "grad", gradients[MATRIX].clone())
    for step in range(STEPS):
        engine.step(global_batch(step), learning_rate=1e-2)
        right.step()
        assert torch.equal(own, other)


def test_singular_values_are_near_one_and_stacks_are_taken_one_by_one() -> None:
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    changed = orthogonalised(matrices, torch.float32)
    values = torch.linalg.svdvals(changed)
    assert values.min() > 0.6
    assert values.max() < 1.3
    for matrix, stacked in zip(matrices, changed, strict=True):
        assert torch.allclose(orthogonalised(matrix, torch.float32), stacked, atol=1e-5)
        assert torch.allclose(orthogonalised(matrix.T, torch.float32), stacked.T, atol=1e-5)


def test_which_parameters_are_matrices() -> None:
    engine = build_engine("mixtral", optimizer=MUON)
    names = matrix_names(engine.model, engine.layout)
    kinds = {name.partition("layers.0.")[2] for name in names if "layers.0." in name}
    assert kinds == {
        *(f"self_attn.{key}_proj.weight" for key in "qkvo"), "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    }  # fmt: skip
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in names)
    states = {key for name in names for key in engine.optimizer.state[engine.trained[name]]}
    assert states == set()
    train_steps(engine, 1)
    of_matrix = {key for name in names for key in engine.optimizer.state[engine.trained[name]]}
    others = {
        key for name, value in engine.trained.items() if name not in names for key in engine.optimizer.state[value]
    }
    assert of_matrix == {"momentum_buffer"}
    assert others == {"step", "exp_avg", "exp_avg_sq"}


@settings(max_examples=20)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), cut=st.integers(0, 9), stacked=st.booleans())
def test_pieces_cover_what_a_rank_holds(rows: int, columns: int, cut: int, stacked: bool) -> None:
    cut = min(cut, columns)
    shape = (2, rows, columns) if stacked else (rows, columns)
    spans = {len(shape) - 1: [Span(begin=cut, size=columns - cut), Span(begin=0, size=cut)]}
    full = (
        torch.arange(2 * rows * columns).view(2, rows, columns)[:, :, :]
        if stacked
        else torch.arange(rows * columns).view(rows, columns)
    )
    local = torch.cat([full[..., cut:], full[..., :cut]], dim=-1)
    found = torch.full_like(full, -1)
    for (_, place), piece in pieces_of("w", local_shard(shape, spans).chunks):
        piece.of_matrix(found[place] if stacked else found).copy_(piece.of_local(local))
    assert torch.equal(found, full)


def test_one_rank_owns_all_of_its_matrices() -> None:
    own = {key: (piece,) for key, piece in pieces_of("w", local_shard((2, 3, 4), {}).chunks)}
    owners = MatrixOwners(own, {"w": (3, 4)})
    assert list(owners.own) == [("w", 0), ("w", 1)]
    assert owners.rounds == []


def test_the_order_and_the_rates() -> None:
    assert newton_schulz_flops(2, 3) == newton_schulz_flops(3, 2) == 5 * (4 * 4 * 3 + 2 * 8)
    assert sorted([(2, 2), (4, 4), (4, 2)], key=lambda shape: order_key(*shape)) == [(4, 4), (4, 2), (2, 2)]
    assert rate_scale("original", 8, 2) == 2.0
    assert rate_scale("original", 2, 8) == 1.0
    assert rate_scale("match_rms_adamw", 2, 16) == pytest.approx(0.8)


LAYOUTS = {
    "ZeRO-3": ("llama", {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}),
    "tp": ("llama", {"mesh": {"tp": 2}}),
    "ep": ("mixtral", {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 2}}),
}


KINDS: tuple[OptimizerKind, ...] = ("muon", "adafactor", "lion")


def _losses(kind: OptimizerKind, family: str, plan: dict[str, Any]) -> tuple[list[float], list[int]]:
    engine = build_engine(family, plan, optimizer=OptimizerPolicy(kind=kind, learning_rate=3e-3))
    losses = [loss for loss, _ in train_steps(engine, STEPS)]
    rounds = [len(routes) for routes in engine.optimizer._owners.rounds] if isinstance(engine.optimizer, Muon) else []
    engine.close()
    return losses, rounds


def _in_rank(_rank: int, _world: int) -> dict[str, tuple[list[float], list[int]]]:
    return {f"{kind} {name}": _losses(kind, *case) for kind in KINDS for name, case in LAYOUTS.items()}


def test_ranks_that_share_matrices_train_as_one() -> None:
    found = run_ranks(_in_rank, 2, timeout_s=600.0)[0]
    for kind in KINDS:
        for family in ("llama", "mixtral"):
            losses, _ = _losses(kind, family, {})
            for name in (name for name, case in LAYOUTS.items() if case[0] == family):
                assert found[f"{kind} {name}"][0] == pytest.approx(losses, rel=2e-5), (kind, name)
    assert found["muon ZeRO-3"][1] == [2] * 21  # 42 matrices, one per rank and round
    assert found["muon ep"][1] == [2] * 4  # 8 of attention; whole experts need no message


def test_the_planner_counts_one_state_of_a_matrix(tmp_path: Path) -> None:
    run = RunSpec.from_tables({"model": {"type": "llama", "config": {"hidden_size": 64, "num_hidden_layers": 2}}})
    sizes = {}
    for optimizer in ("adamw", "muon"):
        path = tmp_path / f"{optimizer}.toml"
        path.write_text(
            run.model_copy(update={"train": run.train.model_copy(update={"optimizer": optimizer})}).to_toml()
        )
        question = ask(str(path), "2xH100-80GB")
        found = estimate(question.request, Plan.from_tables({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}))
        sizes[optimizer] = found.memory_terms["optimizer_state"]
        exchanges = [row for row in found.traffic if row["axis"] == "optimizer"]
        assert bool(exchanges) == (optimizer == "muon")
    linears = [one for kind in question.request.shape.kinds for one in kind.linears]
    matrices = 2 * sum(one.in_features * one.out_features for one in linears)
    assert sizes["adamw"] - sizes["muon"] == 4 * matrices // 2
