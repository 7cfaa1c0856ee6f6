"""The module that is running, in the forward and in the backward, without touching a tensor.

In the forward, hooks keep a stack. In the backward, autograd's running node has the sequence number of its forward,
and the numbers at which modules were entered and left identify its module. (`torch.utils.module_tracker` puts hooks on
tensors instead, which keep recomputed activations alive and so change the peak.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class ModuleWatch:
    """`current()` inside `watching()` is the name of the innermost running module of `model`, "" for none.

    Modules inside the `closed` ones (names) are not distinguished: a hook there would become part of the compiled
    code, which would break the graph, also after the hook is removed.
    """

    def __init__(self, model: nn.Module, *, closed: Collection[str] = ()) -> None:
        insides = tuple(f"{name}." for name in closed)
        self._modules = [module for name, module in model.named_modules() if not name.startswith(insides)]
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._numbers: list[int] = []  # of autograd nodes, rising
        self._since: list[str] = []  # the module that runs from that number on

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks = []
        for module in self._modules:  # before other hooks, whose work then counts as the module's
            hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
            hooks.append(module.register_forward_hook(self._leave, prepend=True, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def reset(self) -> None:
        self._stack.clear()
        self._numbers.clear()
        self._since.clear()

    def current(self) -> str:
        if self._stack:
            return self._stack[-1]
        # Private, both: there is no public name for the running node nor for its number.
        # tests/unit/engine/measure/test_module_watch.py fails when they move.
        node = torch._C._current_autograd_node()
        index = bisect_right(self._numbers, node._sequence_nr()) - 1 if node is not None else -1
        return self._since[index] if index >= 0 else ""

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
        self._mark()

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputed forward: autograd never runs its nodes
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._since.append(self._stack[-1] if self._stack else "")
