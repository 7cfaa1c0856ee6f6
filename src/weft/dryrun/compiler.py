"""`torch.compile` on fake tensors: blocks are traced and partitioned as by Inductor, without its kernels.

Dynamo, Inductor's passes over the joint graph and its partition into forward and backward run unchanged, so a compiled
block saves exactly its real activations. Instead of code, each graph becomes a `Program`, which allocates the memory of
its kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

# Private, as is the import of `_inductor`: no public API compiles up to the partition or gives the reason of a failure.
# tests/fake/dryrun/test_compiled.py fails if these names move.
import torch._functorch.config as functorch
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule

import weft.engine.kernels.compiled as compiled
from weft.core.errors import PipelineError
from weft.dryrun.fusion import Program, ProgramError


@contextmanager
def compiler_without_code() -> Iterator[None]:
    """Wrap a fake world: the tables that torch builds when it first compiles must not contain the world's patches.

    Earlier compilations of this process and those made here are forgotten: Dynamo limits recompilations per code
    object, whoever asks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")  # the compiler's own
        _inductor()
        torch.compile(torch.rsqrt, backend="eager")(torch.ones(1))
        torch.compiler.reset()
        try:
            # these rules may not cover a graph that the real compiler does: eager blocks would be a worse estimate
            with mock.patch.multiple(compiled, BACKEND=_backend, COMPILER_ERRORS=(), HAS_SYMBOLIC_ROWS=False):
                yield
        finally:
            torch.compiler.reset()


def why_not_followed(error: Exception) -> str:
    """Why a block was not compiled, in one line; "" for any other error."""
    cause = error.__cause__ if isinstance(error, PipelineError) else error
    if not isinstance(cause, TorchDynamoException | ProgramError):
        return ""
    return compiled.cause_of(cause)


def _inductor() -> Callable[..., Any]:
    """Imported lazily: it takes seconds."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


def _backend(module: GraphModule, inputs: list[torch.Tensor]) -> Any:
    with functorch.patch(enable_autograd_cache=False):  # a program cannot be cached on disk
        return _inductor()(module, inputs, inner_compile=_program)


def _program(module: GraphModule, _inputs: Any, **_: Any) -> Program:
    return Program(module)
