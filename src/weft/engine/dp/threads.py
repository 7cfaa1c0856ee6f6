"""The legacy nn.DataParallel: one process, one thread per GPU. DDP is faster."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from weft.core.errors import DeviceError, NotBuiltError
from weft.core.plan_checks import DATAPARALLEL_SPREADS
from weft.core.precision import PrecisionPolicy
from weft.engine.dp.strategy import Strategy


class DataParallelSlownessWarning(UserWarning):
    """DataParallel copies the model every step and shares one Python interpreter."""


def require_gpus(precision: PrecisionPolicy) -> None:
    if not torch.cuda.is_available():
        raise DeviceError(
            f"{DATAPARALLEL_SPREADS}, and this machine has none",
            hint="drop the strategy key; on CPU use --nproc N, which runs DDP",
        )
    if precision.is_low:
        raise NotBuiltError("dataparallel runs in fp32 only", hint="use precision.preset = 'fp32', or DDP")


class Threaded(Strategy):
    """nn.DataParallel over all visible GPUs."""

    def __init__(self, model: nn.Module) -> None:
        warnings.warn(
            "nn.DataParallel copies the model every step, in one interpreter: DDP (weft train --nproc N) is faster",
            DataParallelSlownessWarning,
            stacklevel=2,
        )
        super().__init__(nn.DataParallel(model))
