"""The cross-entropy whose logits become their gradient, against torch's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tolerances import SAME_STEP_REL

import weft.engine.kernels.cross_entropy as kernel
from weft.engine.kernels.cross_entropy import Cap, cross_entropy_

CAPS = (Cap(), Cap(before=0.5), Cap(before=1 / 30, after=30.0, is_capped=True))


def expected(logits: torch.Tensor, labels: torch.Tensor, cap: Cap) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(cap.of(leaf), labels, ignore_index=-100, reduction="sum")
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@given(
    rows=st.integers(1, 9),
    vocab_size=st.integers(2, 40),
    seed=st.integers(0, 1000),
    cap=st.sampled_from(CAPS),
    piece=st.integers(1, 100),
)
def test_loss_and_gradient(rows: int, vocab_size: int, seed: int, cap: Cap, piece: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * 5
    labels = torch.randint(0, vocab_size, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = -100
    loss, gradient = expected(logits, labels, cap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "PIECE_ELEMENTS", piece)  # rows come in pieces of any size
        found = cross_entropy_(logits, labels, cap, wants_gradient=True)
    assert found.item() == pytest.approx(loss.item(), rel=SAME_STEP_REL * 10, abs=SAME_STEP_REL * 10)
    assert torch.allclose(logits.double(), gradient, rtol=0, atol=SAME_STEP_REL * 10)


def test_logits_are_left_alone_where_no_gradient_is_wanted() -> None:
    logits = torch.randn(3, 7)
    before = logits.clone()
    cross_entropy_(logits, torch.tensor([1, -100, 6]), Cap(), wants_gradient=False)
    assert torch.equal(logits, before)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    assert cross_entropy_(logits, torch.tensor([0]), Cap(), wants_gradient=True).item() == 0.0
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [
        ("mul", (2.0,), Cap(before=2.0)),
        ("div", (4,), Cap(before=0.25)),
        ("tanh", (), Cap(is_capped=True)),
        ("mul", (torch.ones(3),), None),
        ("mul", (0.0,), None),
        ("exp", (), None),
    ],
)
def test_what_a_cap_takes(name: str, args: tuple[object, ...], result: Cap | None) -> None:
    assert Cap().then(name, *args) == result


def test_a_second_tanh_is_not_a_cap() -> None:
    assert Cap(is_capped=True).then("tanh") is None
