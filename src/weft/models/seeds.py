"""`torch.manual_seed` for code that seeds often: per module of a model, per block and micro-batch, per unit of work.

Without an accelerator torch.manual_seed keeps the seed for CUDA, XPU and MTIA devices that may start later, each time
with the formatted call stack: a millisecond or more per seed.
"""

from __future__ import annotations

import torch


def seed_generators(seed: int) -> None:
    """Seed the default generators of the CPU and of the accelerator, where there is one."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
