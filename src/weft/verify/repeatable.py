"""Runs that are to be equal bit by bit. A GPU's fused attention adds up the gradients of queries in the order in which
its parts end, so two right runs differ in their last bits; there attention is written out for such comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._functorch.config as functorch  # no public form: tests/gpu/test_fast_path_gpu.py fails when it moves
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.core.plan import Plan


@contextmanager
def repeatable(plan: Plan, device: torch.device) -> Iterator[Plan]:
    """The plan to run inside: `plan` itself where its bits repeat as it stands."""
    if device.type != "cuda":
        yield plan
        return
    # What torch remembers of a compiled block does not say which attention it took: it is not asked.
    kernels = plan.kernels.model_copy(update={"attention": "torch"})  # timed ones would be taken all the same
    with sdpa_kernel(SDPBackend.MATH), functorch.patch(enable_autograd_cache=False):
        yield plan.model_copy(update={"kernels": kernels})
