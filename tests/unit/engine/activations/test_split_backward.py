"""Backward in two halves on one process: the same gradients, and nothing held once they are there."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn

from weft.engine.activations.split_backward import SplitBackward


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def given() -> Tensor:
    return torch.linspace(-1, 1, 12).reshape(1, 3, 4).requires_grad_()


def test_weights_get_their_gradients_in_the_second_half() -> None:
    whole, cut, x = two_layers(), two_layers(), given()
    whole(x).square().sum().backward()
    expected = x.grad
    x.grad = None
    with SplitBackward() as deferred:
        loss = cut(x).square().sum()
    loss.backward()
    torch.testing.assert_close(x.grad, expected)
    assert all(layer.weight.grad is None for layer in (cut[0], cut[2]))
    deferred.run()
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_what_waited_is_let_go_without_the_garbage_collector() -> None:
    """An input with its graph would hold the node that holds the list of what waits, for ever."""
    model, x, seen = two_layers(), given(), []
    model[1].register_forward_hook(lambda _module, _args, output: seen.append(weakref.ref(output.untyped_storage())))
    gc.disable()
    try:
        with SplitBackward() as deferred:
            loss = model(x).square().sum()
        loss.backward()
        assert seen[0]() is not None  # it waits
        deferred.run()
        del loss
        assert seen[0]() is None
    finally:
        gc.enable()
