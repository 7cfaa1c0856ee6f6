"""The module at work is known in the forward, in the backward, and where a forward runs again inside a backward."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.comm.watch import OperatorWatch
from weft.engine.measure.module_watch import ModuleWatch


class Block(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        self.recomputes = recomputes

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return torch.as_tensor(checkpoint(self.inner, hidden, use_reentrant=False))
        return self.inner(hidden)

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(self.up(hidden).relu()))


class Products:
    """Notes at which module every matrix product ran."""

    def __init__(self, modules: ModuleWatch) -> None:
        self.modules = modules
        self.found: list[str] = []

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func is torch.ops.aten.mm.default:
            self.found.append(self.modules.current())


def products_of(model: nn.Module) -> tuple[list[str], list[str]]:
    modules = ModuleWatch(model)
    products = Products(modules)
    hidden = torch.randn(4, 8, requires_grad=True)
    with modules.watching(), OperatorWatch(products):
        loss = model(hidden).sum()
        forward, products.found = products.found, []
        loss.backward()
    return forward, products.found


def test_forward_and_backward() -> None:
    forward, backward = products_of(nn.Sequential(Block(False), Block(False)))
    assert forward == ["0.up", "0.down", "1.up", "1.down"]
    assert backward == ["1.down", "1.down", "1.up", "1.up", "0.down", "0.down", "0.up", "0.up"]


def test_a_forward_that_runs_again() -> None:
    _, backward = products_of(nn.Sequential(Block(False), Block(True)))
    assert backward[0] == "1.up"  # again
    assert set(backward[1:5]) == {"1.down", "1.up"}
    assert backward[-4:] == ["0.down", "0.down", "0.up", "0.up"]


def test_an_exception_in_a_forward_leaves_no_module_behind() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    modules = ModuleWatch(model)
    with modules.watching():
        with contextlib.suppress(RuntimeError):
            model(torch.randn(4, 9))
        assert modules.current() == ""
