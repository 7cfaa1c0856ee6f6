"""`HostCopy`: values of the device on their way to the host, read without a wait for steps that were issued later.

Reading a tensor of a GPU waits for all work of its stream: the numbers of a step would come with the end of the next.
"""

from __future__ import annotations

import torch
from torch._guards import active_fake_mode

from weft.engine.measure.timer import record_event


class HostCopy:
    """Begins to copy `values` when it is made; on a CPU, and in a dry run, it is `values` itself."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda and active_fake_mode() is None:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)  # else the copy would wait
            self._values.copy_(values, non_blocking=True)
            self._copied = record_event()

    def wait(self) -> torch.Tensor:
        """The values in the host's memory."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.cpu()
