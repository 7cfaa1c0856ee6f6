"""Delayed float8 scales: factors from the history, products against a plain emulation, a history in checkpoints."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import build_engine, global_batch, train_steps
from torch import Tensor

from weft.comm.groups import ensure_group
from weft.core.errors import PlanError
from weft.core.executable import not_executed_reasons
from weft.core.plan import Plan
from weft.core.plan_checks import require_consistent
from weft.engine.kernels.float8 import scaled_product
from weft.engine.kernels.float8_delayed import ROLES, DelayedScales
from weft.engine.kernels.float8_operands import WHOLE, Role
from weft.engine.kernels.float8_scaling import Scaling
from weft.verify.float8_delayed import PlainDelayed
from weft.verify.float8_reference import _Rounded

CPU = torch.device("cpu")
DELAYED = {"linears": "all", "recipe": "delayed", "amax_history": 3}
TABLES = {"precision": {"preset": "bf16"}, "float8": DELAYED}


@pytest.fixture(autouse=True)
def _group() -> None:
    ensure_group(device_type="cpu")


def scales(*, length: int = 3, margin: int = 0) -> DelayedScales:
    return DelayedScales(["a", "b"], length=length, margin=margin, device=CPU)


def step(delayed: DelayedScales, largest: float, *, role: Role = "activation", is_skipped: bool = False) -> None:
    with delayed.recording():
        delayed.of("a").quantise(torch.tensor([[0.5, -largest], [largest / 2, 0.0]]), role, WHOLE)
    delayed.finish_step(is_skipped=is_skipped)


def factor(delayed: DelayedScales, role: Role = "activation") -> float:
    return float(delayed.of("a").factors[ROLES.index(role)])


def test_a_factor_looks_back_as_many_steps_as_the_history_is_long() -> None:
    delayed, found = scales(), []
    for largest in (2.0, 8.0, 4.0, 1.0, 1.0):
        step(delayed, largest)
        found.append(448 / factor(delayed))
    assert found == [2.0, 8.0, 8.0, 8.0, 4.0]
    assert factor(delayed, "gradient") == 1.0, "no gradient yet"


def test_gradients_have_the_range_of_e5m2_and_a_margin_leaves_room() -> None:
    delayed = scales(margin=2)
    step(delayed, 4.0, role="gradient")
    assert factor(delayed, "gradient") == 57344 / 4 / 4


def test_values_above_the_history_saturate() -> None:
    delayed = scales()
    step(delayed, 1.0)
    codes, back = delayed.of("a").quantise(torch.tensor([[3.0, 0.5]]), "activation", WHOLE)
    assert (codes.float() * back).tolist() == [[1.0, 0.5]]


def test_a_skipped_step_an_evaluation_and_infinity_leave_no_amax() -> None:
    delayed = scales(length=1)
    step(delayed, 2.0)
    step(delayed, 64.0, is_skipped=True)
    delayed.of("a").quantise(torch.tensor([[32.0]]), "activation", WHOLE)  # outside of a step
    assert factor(delayed) == 224
    step(delayed, float("inf"))
    assert factor(delayed) == 1.0, "a history of zeros"


@pytest.mark.parametrize("margin", [0, 1])
def test_products_are_those_of_a_plain_emulation(margin: int) -> None:
    delayed, plain = scales(margin=margin), PlainDelayed(3, margin)
    scaling = Scaling("delayed", delayed=delayed.of("a"))
    generator = torch.Generator().manual_seed(0)
    for at in range(6):
        plain.begin(at)
        with delayed.recording():
            for _ in range(2):  # micro-batches: one scale for both
                made, expected = both_products(scaling, plain, generator, size=(4.0 if at == 1 else 0.5))
                for found, right in zip(made, expected, strict=True):
                    assert torch.equal(found, right)
        delayed.finish_step(is_skipped=False)


def both_products(
    scaling: Scaling, plain: PlainDelayed, generator: torch.Generator, *, size: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of the engine's product and of the emulation; powers of two, whose products are exact."""
    x, w, g = (
        torch.exp2(torch.randint(-3, 3, shape, generator=generator)) * size for shape in ((32, 16), (16, 16), (32, 16))
    )
    found = []
    rounding = lambda operand, values: plain.rounded("a", operand, values, is_noted=True)  # noqa: E731
    for is_plain in (False, True):
        rows, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        made = _Rounded.apply(rows, weight, rounding, None, True) if is_plain else scaled_product(rows, weight, scaling)
        made.backward(g)
        assert rows.grad is not None
        assert weight.grad is not None
        found.append([made.detach(), rows.grad, weight.grad])
    return found[0], found[1]


def history(engine: Any) -> dict[str, Any]:
    found = engine.float8.delayed_scalars()
    return {name: np.frombuffer(base64.b64decode(row), dtype="<f4").reshape(3, -1) for name, row in found.items()}


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path) -> None:
    straight = build_engine("llama", TABLES)
    losses = train_steps(straight, 4)
    first = build_engine("llama", TABLES)
    train_steps(first, 2)
    first.evaluate(global_batch(9))
    first.save(tmp_path)
    resumed = build_engine("llama", TABLES)
    resumed.load(tmp_path)
    assert train_steps(resumed, 2, first=2) == losses[2:]
    assert resumed.float8.delayed_scalars() == straight.float8.delayed_scalars()
    assert all((row > 0).all() for row in history(straight).values()), "3 steps of 3 operands"

    forgetful = build_engine("llama", TABLES)
    forgetful.load(tmp_path)
    forgetful.float8.restore_delayed({})
    assert train_steps(forgetful, 2, first=2) != losses[2:], "the history matters"


def test_another_length_takes_the_newest_steps(tmp_path: Path) -> None:
    engine = build_engine("llama", TABLES)
    train_steps(engine, 3)
    engine.save(tmp_path)
    shorter = build_engine("llama", {**TABLES, "float8": {**DELAYED, "amax_history": 2}})
    shorter.load(tmp_path)
    assert all((row == history(engine)[name][:, :2]).all() for name, row in history(shorter).items())
    tensorwise = build_engine("llama", {**TABLES, "float8": {"linears": "all"}})
    assert tensorwise.load(tmp_path) == 3


def test_what_makes_no_sense_is_refused_with_its_reason() -> None:
    for tables, words in (
        ({"linears": "all", "margin": 1}, "float8.margin without delayed scales"),
        ({**DELAYED, "experts": "all"}, "experts get other rows in every step"),
        ({**DELAYED, "gather": "float8"}, "sends one scale per weight"),
    ):
        with pytest.raises(PlanError, match=words):
            require_consistent(Plan.from_tables({**TABLES, "float8": tables}))
    late = {**TABLES, "mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}}
    (why, hint), *_ = not_executed_reasons(Plan.from_tables(late))
    assert "scales and weights would be of different steps" in why
    assert "tensorwise" in hint


def test_codes_of_a_first_step_are_those_of_its_own_operands() -> None:
    x, w = torch.randn(32, 16), torch.randn(16, 16)
    delayed = Scaling("delayed", delayed=scales().of("a"))
    assert torch.equal(scaled_product(x, w, delayed), scaled_product(x, w, Scaling("tensorwise")))
    assert not torch.equal(scaled_product(x, w, delayed), F.linear(x, w))
