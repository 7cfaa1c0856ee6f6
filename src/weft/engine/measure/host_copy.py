"""`HostCopy`: values of the device on their way to the host, read without a wait for steps that were issued later.

Reading a tensor of a GPU waits for all work of its stream: the numbers of a step would come with the end of the next.
The copy has a stream of its own: on that of the computation it would queue behind the copies of offloaded states, which
share the direction, and the next step with it.
"""

from __future__ import annotations

import functools

import torch
from torch._guards import active_fake_mode

from weft.engine.measure.timer import record_event


class HostCopy:
    """Begins to copy `values` when it is made; on a CPU, and in a dry run, it is `values` itself."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda and active_fake_mode() is None:
            stream = _stream_of(values.device)
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)  # else the copy would wait
            stream.wait_stream(torch.cuda.current_stream(values.device))
            with torch.cuda.stream(stream):
                self._values.copy_(values, non_blocking=True)
                self._copied = record_event()
            values.record_stream(stream)

    def wait(self) -> torch.Tensor:
        """The values in the host's memory."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.cpu()


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
