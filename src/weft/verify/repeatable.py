"""Runs that are to be equal bit by bit. A GPU's fused attention adds up the gradients of queries in the order in which
its parts end, so two right runs differ in their last bits; there attention is written out for such comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend

from weft.core.plan import Plan
from weft.engine.kernels.attention import prefer_kernels


@contextmanager
def repeatable(plan: Plan, device: torch.device) -> Iterator[Plan]:
    """The plan to run inside: `plan` itself where its bits repeat as it stands."""
    if device.type != "cuda":
        yield plan
        return
    kernels = plan.kernels.model_copy(update={"attention": "torch"})  # timed ones would be taken all the same
    with prefer_kernels(SDPBackend.MATH):
        yield plan.model_copy(update={"kernels": kernels})
