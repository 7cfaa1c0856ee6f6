"""Runs the micro-batches of a step: the interface, and the loop of a model whose blocks are all on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from weft.core.terms import TimeTerm
from weft.engine.measure.timer import StepTimer
from weft.engine.objective import Batch

if TYPE_CHECKING:
    from weft.engine.dp.strategy import Strategy

Forward = Callable[[int, int], Tensor]  # (stage, micro-batch) -> hidden states, or the loss on the last stage


class MicrobatchRunner(Protocol):
    """`is_in_backward`: part of a pipeline's backward runs outside of autograd; measurements read this flag."""

    @property
    def is_in_backward(self) -> bool: ...

    def callable_for(self, module: nn.Module, stage: int) -> Any:
        """The model as an objective calls it."""
        ...

    def train(
        self, forward: Forward, microbatches: Sequence[Batch], strategy: Strategy, timer: StepTimer, updates: Any
    ) -> None:
        """Compute the gradients of every micro-batch. `updates`: those of this step, for runners that make them."""
        ...

    def measure(self, forward: Forward, microbatches: Sequence[Batch], strategy: Strategy) -> None:
        """Run the forwards alone."""
        ...


class SequentialRunner:
    """Forward and backward of each micro-batch, one after the other."""

    def __init__(self) -> None:
        self.is_in_backward = False

    def callable_for(self, module: nn.Module, stage: int) -> Any:
        return module

    def train(
        self, forward: Forward, microbatches: Sequence[Batch], strategy: Strategy, timer: StepTimer, updates: Any
    ) -> None:
        for index in range(len(microbatches)):
            with strategy.microbatch(is_last=index == len(microbatches) - 1):
                loss = forward(0, index)
                timer.mark(TimeTerm.FORWARD)
                loss.backward()  # type: ignore[no-untyped-call]
                if index == len(microbatches) - 1:
                    self.is_in_backward = True  # sums over replicas are its traffic
                    strategy.after_backwards()
                    self.is_in_backward = False
                timer.mark(TimeTerm.BACKWARD)

    def measure(self, forward: Forward, microbatches: Sequence[Batch], strategy: Strategy) -> None:
        for index in range(len(microbatches)):
            forward(0, index)
