"""Where a GPU's time goes: the kernels of one step by class, from torch's profiler. A CPU has none to tell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType  # of the profiler's rows; it has no public name

# The first that matches, by the names that cuBLAS, cuDNN, Inductor and torch give their kernels.
CLASSES: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|sdpa|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|s16816|wgmma|bmm"),
    ("optimizer", r"adam|^_update|multi_tensor|lpnorm"),
    ("loss", r"^_rows|^_scale|softmax|nll_loss|logsumexp|cross_entropy"),
    ("compiled", r"^triton_|^_\w+_kernel"),
    ("copies", r"^_copy|^_quantise|memcpy|memset|copy_|catarray|split_with_sizes|chunk_cat|direct_copy|fill"),
    ("elementwise", r"elementwise|reduce|vectorized|index|embedding|norm|sort|scan"),
)
_ANNOTATIONS = (
    "FSDP",
    "Optimizer",
    "ProfilerStep",
    "torch",
    "Torch",
    "Compiled",
    "##",
    "Command Buffer",
    "Context Sync",
)
LARGEST = 24


@dataclass(frozen=True, kw_only=True)
class KernelTimes:
    """Seconds of one step; classes may run side by side, so their sum may be more than the step."""

    by_class: dict[str, float] = field(default_factory=dict)
    largest: tuple[tuple[str, float], ...] = ()


def kernel_times(step: Callable[[], Any], device: torch.device) -> KernelTimes:
    if device.type != "cuda":
        return KernelTimes()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize(device)
    by_class: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for event in seen.events() or ():
        # a GPU's rows hold copies of the host's annotations too: they span kernels that have rows of their own
        if event.device_type != DeviceType.CUDA or event.name.startswith(_ANNOTATIONS):
            continue
        seconds = event.time_range.elapsed_us() / 1e6
        by_class[class_of(event.name)] += seconds
        by_name[event.name[:120]] += seconds
    ranked = sorted(by_class.items(), key=lambda item: -item[1])
    return KernelTimes(by_class=dict(ranked), largest=tuple(by_name.most_common(LARGEST)))


def class_of(name: str) -> str:
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")
