"""Seeds: the numbers of torch.manual_seed, without its work for devices that this machine lacks."""

from __future__ import annotations

import traceback

import pytest
import torch

from weft.models.seeds import seed_generators


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, (3 << 32) + 5])
def test_numbers_are_those_of_torch(seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.rand(4)
    seed_generators(seed)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator is seeded")
def test_no_call_stack_is_formatted_for_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    formatted: list[int] = []
    monkeypatch.setattr(traceback, "format_stack", lambda: formatted.append(1) or [])
    seed_generators(0)
    assert formatted == []
    torch.manual_seed(0)
    assert formatted, "torch formats no call stacks: weft.models.seeds is not needed"
