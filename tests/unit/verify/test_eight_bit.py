"""8-bit moments in one process are those of the engine's optimizer."""

from __future__ import annotations

import torch
from tolerances import FLIPPED_CODES_SHARE, SAME_LOWBIT_MOMENT_REL, SAME_LOWBIT_WEIGHT_ABS
from torch import nn

from weft.engine.optim.adamw_8bit import build_adamw8bit, quantised_parts
from weft.verify.eight_bit import decode_moments, round_moments


def test_rounded_moments_are_the_codes_of_the_engine() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(64, 64), [torch.randn(64, 64) for _ in range(3)]
    plain, coded = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = torch.optim.AdamW([plain], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, foreach=False)
    theirs = build_adamw8bit([{"params": [coded]}], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for gradient in gradients:
        plain.grad, coded.grad = gradient.clone(), gradient.clone()
        ours.step()
        round_moments(ours, [plain])
        theirs.step()
    assert torch.allclose(plain, coded, rtol=0, atol=SAME_LOWBIT_WEIGHT_ABS)
    for key in ("exp_avg", "exp_avg_sq"):
        parts = quantised_parts(theirs.state[coded][key])
        assert parts is not None
        decoded = decode_moments({f"w.{key}.codes": parts.codes, f"w.{key}.scales": parts.scales})
        assert torch.equal(decoded[f"w.{key}"], theirs.state[coded][key].dequantize())
        same = torch.isclose(ours.state[plain][key], decoded[f"w.{key}"], rtol=SAME_LOWBIT_MOMENT_REL, atol=0.0)
        assert (~same).float().mean() < FLIPPED_CODES_SHARE


def test_small_tensors_and_other_states_stay_as_they_are() -> None:
    small = nn.Parameter(torch.randn(8, 8))
    optimizer = torch.optim.AdamW([small])
    small.grad = torch.randn(8, 8)
    optimizer.step()
    before = optimizer.state[small]["exp_avg"].clone()
    round_moments(optimizer, [small])
    assert torch.equal(optimizer.state[small]["exp_avg"], before)
    state = {"w.step": torch.tensor(3.0), "w.exp_avg": before}
    assert decode_moments(state).keys() == state.keys()
