"""`torch.compile` of what is repeated: every block's own forward, and small layers outside the blocks.

The compiled forward is the innermost part of a block: hooks that gather and reduce, casts and recompute stay outside,
so one graph serves all blocks that are alike. A step's later micro-batches and steps have the shapes of the first, so
shapes are constants (`dynamic=False`); a batch of another shape compiles once more.
"""

from __future__ import annotations

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
from weft.engine.wrap_forward import Forward, replace_own
from weft.models.layout import ModelLayout

BACKEND = "inductor"
# What a product reads (act(gate) * up, a normalised input) is cheap to make again in the kernel that needs its parts
# anyway. By default it is kept: 21 KB a token and block of Llama-3.2-1B, a third of all that is.
KEEPS_LESS = {"ban_recompute_materialized_backward": False}
# Kernels are not chosen by how fast they were just now: two forms of a sum round differently, and a run would not have
# the same bits again, nor ranks among each other. On an H200 it costs nothing (0.1% of an 8B step).
FIXED: dict[str, Any] = {"deterministic": True}
FORGIVEN: tuple[type[Exception], ...] = (TorchDynamoException,)  # the compiler's own errors; the model's it passes on
_PLAIN = (nn.Linear, nn.Embedding)  # one product or lookup: nothing to fuse


def apply_compile(model: nn.Module, layout: ModelLayout, *, device: torch.device) -> tuple[str, ...]:
    """Compile the forwards of all blocks, and of the layers with weights that stand alone (a final norm).

    Returns what there is to say: a model that drops or jitters stays as it is, since its masks are drawn row by row.
    """
    if uses_randomness(model):
        return ("the blocks are not compiled: the model has dropout, whose masks depend on the row, not on the layout",)
    _require_compiler(device)
    torch.compiler.reset()  # graphs are kept by the model's code, eight at most: not those of engines before this one
    for name in layout.blocks:
        replace_own(model.get_submodule(name), _Compiled)
    for module in _alone(model, layout):
        replace_own(module, _Compiled)
    return ()


def _require_compiler(device: torch.device) -> None:
    """Where it is missing the first step would end inside the compiler."""
    program = os.environ.get("CXX", "g++")
    if device.type == "cpu" and BACKEND == "inductor" and shutil.which(program) is None:
        raise DeviceError(
            f"compiled blocks on a CPU need a C++ compiler, and there is no {program}",
            hint="install one (CXX names it), or set compile.enabled = false",
        )


class _Compiled:
    """Compiles at its first call, and for a new shape; then calls what was compiled.

    What the compiler cannot do it runs as it stands: the numbers are the same, and the run says why it is slower.
    """

    def __init__(self, own: Forward) -> None:
        self._own = own
        options = FIXED if BACKEND == "inductor" else None
        self._call: Any = torch.compile(own, backend=BACKEND, dynamic=False, options=options)
        self._is_off = False
        self.failure = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_off:
            return self._own(*args, **kwargs)
        # by default one graph too many is none, and nobody is told; told once, shapes that have a graph keep it
        tells_limit = {"fail_on_recompile_limit_hit": not self.failure}
        try:
            with partitioner.patch(KEEPS_LESS), dynamo.patch(tells_limit):
                return self._call(*args, **kwargs)
        except FailOnRecompileLimitHit:
            self.failure = f"one block has more than {dynamo.recompile_limit} shapes: later ones are not compiled"
        except FORGIVEN as error:  # both directions are compiled before anything runs
            self.failure, self._is_off = cause_of(error), True
        return self._own(*args, **kwargs)


def failures(model: nn.Module) -> list[str]:
    """Why parts of `model` run as they stand though they were to be compiled, each cause once."""
    own = (getattr(module.forward, "own", None) for module in model.modules())
    return list(dict.fromkeys(part.failure for part in own if isinstance(part, _Compiled) and part.failure))


def cause_of(error: BaseException) -> str:
    """What the compiler stumbled over, in a line: neither who says it nor its advice on log settings."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line and not line.endswith(":")), type(error).__name__)[:200]


def _alone(model: nn.Module, layout: ModelLayout) -> Iterator[nn.Module]:
    inside = {id(part) for name in layout.blocks for part in model.get_submodule(name).modules()}
    for module in model.modules():
        is_leaf = next(module.children(), None) is None and next(module.parameters(), None) is not None
        if is_leaf and id(module) not in inside and not isinstance(module, _PLAIN):
            yield module


class RecompileWatch(logging.Handler):
    """Hears why compiled code is compiled once more. Torch tells it to a logger of this name alone:
    tests/unit/engine/kernels/test_compiled.py fails when it moves."""

    LOGGER = "torch._dynamo.guards.__recompiles"

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self._causes: list[str] = []
        self._logger = logging.getLogger(self.LOGGER)
        silent: list[logging.Handler] = [logging.NullHandler()]
        was_on = log_state.is_artifact_enabled("recompiles")  # type: ignore[no-untyped-call]
        self._after = (list(self._logger.handlers), self._logger.propagate) if was_on else (silent, False)
        set_logs(recompiles=True)  # puts a printer of its own there; nothing where TORCH_LOGS is set: somebody listens
        self._logger.handlers, self._logger.propagate = [self], False  # else all of it is printed too

    def emit(self, record: logging.LogRecord) -> None:
        lines = [line.strip(" -") for line in record.getMessage().splitlines()]
        self._causes.append(lines[-1].partition(": ")[2] or lines[-1])

    def take(self) -> list[str]:
        """The causes since it was asked last."""
        causes, self._causes = list(dict.fromkeys(self._causes)), []
        return causes

    def close(self) -> None:
        self._logger.handlers, self._logger.propagate = self._after
        super().close()
