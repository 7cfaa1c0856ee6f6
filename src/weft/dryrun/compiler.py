"""`torch.compile` where nothing is real: blocks are traced and cut as Inductor does it, its kernels are left out.

Dynamo, Inductor's passes over the joint graph and its cut into forward and backward run as they are, so what a compiled
block keeps is what it really keeps. Instead of code, each half becomes a `Program`, which takes the memory its kernels
would.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

# Private, as is what `_inductor` imports: nothing public compiles as far as the cut, or says why it cannot.
# tests/fake/dryrun/test_compiled.py fails when they move.
import torch._functorch.config as functorch
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule

import weft.engine.kernels.compiled as compiled
from weft.core.errors import PipelineError
from weft.dryrun.fusion import Program, ProgramError


@contextmanager
def compiler_without_code() -> Iterator[None]:
    """Around a fake world: what torch lists of itself when it first compiles must not be what stands in for it there.

    What was compiled in this process before is forgotten, and so is what is compiled here: Dynamo compiles one piece
    of code a few times only, whoever asks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")  # of the compiler, about itself
        _inductor()
        torch.compile(torch.rsqrt, backend="eager")(torch.ones(1))
        torch.compiler.reset()
        try:
            # a real compiler may do what these rules do not cover: then another stand-in is nearer than eager blocks
            with mock.patch.object(compiled, "BACKEND", _backend), mock.patch.object(compiled, "COMPILER_ERRORS", ()):
                yield
        finally:
            torch.compiler.reset()


def why_not_followed(error: Exception) -> str:
    """What kept a block from being compiled, in a line; "" where something else went wrong."""
    cause = error.__cause__ if isinstance(error, PipelineError) else error
    if not isinstance(cause, TorchDynamoException | ProgramError):
        return ""
    return compiled.cause_of(cause)


def _inductor() -> Callable[..., Any]:
    """Imported where something is compiled: it takes seconds."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


def _backend(module: GraphModule, inputs: list[torch.Tensor]) -> Any:
    with functorch.patch(enable_autograd_cache=False):  # a program is no code that could be kept on disk
        return _inductor()(module, inputs, inner_compile=_program)


def _program(module: GraphModule, _inputs: Any, **_: Any) -> Program:
    return Program(module)
