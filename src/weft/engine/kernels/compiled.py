"""`torch.compile` of every block's own forward, and of small layers outside the blocks.

The compiled forward is the innermost part of a block: hooks that gather and reduce, casts and recompute stay outside,
so one graph serves all blocks of one kind. Later micro-batches and steps have the shapes of the first, so shapes are
constants (`dynamic=False`); a batch of another shape is compiled again.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config as dynamo  # no public form: the same test
import torch._functorch.config as partitioner  # no public form: engine/kernels/test_compiled.py fails when it moves
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # the same
from torch._logging._internal import log_state, set_logs

from weft.core.errors import DeviceError
from weft.engine.activations.dropout import uses_randomness
from weft.engine.kernels.float8_accuracy import is_measuring
from weft.engine.wrap_forward import CompiledInside, Forward, is_wrapped, layers_inside, replace_own
from weft.models.layout import ModelLayout

BACKEND = "inductor"
HAS_SYMBOLIC_ROWS = True  # a dry run, whose sizes are known, has none
# Inputs of matmuls (act(gate) * up, a normalised input) are cheap to recompute in the kernel that reads their operands
# anyway. By default they are saved: 21 KB per token and block of Llama-3.2-1B, a third of all saved activations.
SAVES_LESS = {"ban_recompute_materialized_backward": False}
# No autotuning: two forms of a sum round differently, so the bits would differ between runs and between ranks.
# On an H200 this costs nothing (0.1% of an 8B step).
FIXED: dict[str, Any] = {"deterministic": True}
COMPILER_ERRORS: tuple[type[Exception], ...] = (TorchDynamoException,)  # the compiler's errors; the model's are raised
_PLAIN = (nn.Linear, nn.Embedding)  # one matmul or lookup: nothing to fuse


def apply_compile(model: nn.Module, layout: ModelLayout, *, device: torch.device) -> tuple[str, ...]:
    """Compile the forwards of all blocks, and of layers with weights outside of them (a final norm).

    Returns notes: a model with dropout or jitter is not compiled, since its masks are drawn per row.
    """
    if uses_randomness(model):
        return ("the blocks are not compiled: the model has dropout, whose masks depend on the row, not on the layout",)
    _require_compiler(device)
    torch.compiler.reset()  # torch caches eight graphs per code object: drop those of earlier engines
    limit = _graph_limit(model, layout)
    for name in layout.blocks:
        replace_own(model.get_submodule(name), lambda own: _Compiled(own, limit=limit))
    for module in _standalone_layers(model, layout):
        replace_own(module, lambda own: _Compiled(own, limit=limit))
    for layer in layers_inside(model):
        if isinstance(layer, CompiledInside):
            layer.compile_inside(functools.partial(_Compiled, limit=limit))
    return ()


def _graph_limit(model: nn.Module, layout: ModelLayout) -> int:
    """Graphs per code object: torch's number of shapes, and one per block whose modules have wrapped forwards.

    A wrapped forward (of experts over ranks, of a router with a loss) is an object of its own in every block.
    """
    inside = (part for name in layout.blocks for part in [*model.get_submodule(name).modules()][1:])
    return int(dynamo.recompile_limit) + (len(layout.blocks) if any(map(is_wrapped, inside)) else 0)


def _require_compiler(device: torch.device) -> None:
    """Without it the first step would fail inside torch.compile."""
    program = os.environ.get("CXX", "g++")
    if device.type == "cpu" and BACKEND == "inductor" and shutil.which(program) is None:
        raise DeviceError(
            f"compiled blocks on a CPU need a C++ compiler, and {program} was not found",
            hint="install one (CXX names it), or set compile.enabled = false",
        )


class _Compiled:
    """Compiles at its first call, and per new shape.

    On an error of the compiler the forward runs eagerly: the numbers are the same, and the run reports the cause.
    """

    def __init__(self, own: Forward, *, limit: int | None = None, has_any_rows: bool = False) -> None:
        """`limit`: graphs per code object; torch's own number if None. `has_any_rows`: one graph for any first size."""
        self._own, self._limit = own, limit or int(dynamo.recompile_limit)
        has_any_rows = has_any_rows and HAS_SYMBOLIC_ROWS
        options = FIXED if BACKEND == "inductor" else None
        self._call: Any = torch.compile(own, backend=BACKEND, dynamic=None if has_any_rows else False, options=options)
        self._is_off, self._has_any_rows = False, has_any_rows
        self.failure = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_off or is_measuring():
            return self._own(*args, **kwargs)
        if self._has_any_rows:
            for tensor in (value for value in args if isinstance(value, torch.Tensor)):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # torch documents it by this name
        # by default torch silently runs eagerly beyond the limit; after the report compiled shapes keep their graph
        report_limit = {"fail_on_recompile_limit_hit": not self.failure, "recompile_limit": self._limit}
        try:
            with partitioner.patch(SAVES_LESS), dynamo.patch(report_limit):
                return self._call(*args, **kwargs)
        except FailOnRecompileLimitHit:
            self.failure = f"one block has more than {self._limit} shapes: later ones are not compiled"
        except COMPILER_ERRORS as error:  # forward and backward are compiled before anything runs
            self.failure, self._is_off = cause_of(error), True
        return self._own(*args, **kwargs)


def failures(model: nn.Module) -> list[str]:
    """The causes, each once, for which modules of `model` run eagerly though the plan compiles them."""
    own = [getattr(module.forward, "own", None) for module in model.modules()]
    own += [layer.compiled for layer in layers_inside(model) if isinstance(layer, CompiledInside)]
    return list(dict.fromkeys(part.failure for part in own if isinstance(part, _Compiled) and part.failure))


def cause_of(error: BaseException) -> str:
    """The compiler's cause in one line, without its origin and its advice on log settings."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line and not line.endswith(":")), type(error).__name__)[:200]


def _standalone_layers(model: nn.Module, layout: ModelLayout) -> Iterator[nn.Module]:
    inside = {id(part) for name in layout.blocks for part in model.get_submodule(name).modules()}
    for module in model.modules():
        is_leaf = next(module.children(), None) is None and next(module.parameters(), None) is not None
        if is_leaf and id(module) not in inside and not isinstance(module, _PLAIN):
            yield module


class RecompileWatch(logging.Handler):
    """Records why compiled code is compiled again. Torch reports it only to a logger of this name:
    tests/unit/engine/kernels/test_compiled.py fails when it moves."""

    LOGGER = "torch._dynamo.guards.__recompiles"

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self._causes: list[str] = []
        self._logger = logging.getLogger(self.LOGGER)
        silent: list[logging.Handler] = [logging.NullHandler()]
        was_on = log_state.is_artifact_enabled("recompiles")  # type: ignore[no-untyped-call]
        self._after = (list(self._logger.handlers), self._logger.propagate) if was_on else (silent, False)
        set_logs(recompiles=True)  # adds a printing handler; a no-op if the user has set TORCH_LOGS
        self._logger.handlers, self._logger.propagate = [self], False  # else every recompile is printed too

    def emit(self, record: logging.LogRecord) -> None:
        lines = [line.strip(" -") for line in record.getMessage().splitlines()]
        self._causes.append(lines[-1].partition(": ")[2] or lines[-1])

    def take(self) -> list[str]:
        """The causes since the last call."""
        causes, self._causes = list(dict.fromkeys(self._causes)), []
        return causes

    def close(self) -> None:
        self._logger.handlers, self._logger.propagate = self._after
        super().close()
