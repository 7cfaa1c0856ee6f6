"""GPU time of one step by class of kernel, from torch's profiler. Empty on a CPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._autograd import DeviceType  # no public name exists

# The first pattern that matches a kernel name of cuBLAS, cuDNN, Inductor or torch gives the class.
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
    """Seconds of one step; classes may run concurrently, so their sum may exceed the step."""

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
        # a GPU's rows include copies of host annotations, which span kernels with rows of their own
        if event.device_type != DeviceType.CUDA or event.name.startswith(_ANNOTATIONS):
            continue
        seconds = event.time_range.elapsed_us() / 1e6
        by_class[class_of(event.name)] += seconds
        by_name[event.name[:120]] += seconds
    ranked = sorted(by_class.items(), key=lambda item: -item[1])
    return KernelTimes(by_class=dict(ranked), largest=tuple(by_name.most_common(LARGEST)))


def class_of(name: str) -> str:
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")
