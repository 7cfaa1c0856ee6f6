"""`StepMeter`: the cost of one step of an engine on this rank: peak memory by term, bytes sent, operations.

Steps are alike, so each one predicts the moment of the next one's peak; at that moment the next step assigns every live
byte to a term. `is_complete` once the prediction was right: with the second step, unless steps differ. The same code
measures real steps and dry runs.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weft.comm.ledger import TrafficLedger
from weft.comm.watch import OperatorWatch
from weft.core.axes import DP_REPLICATE
from weft.core.records import HolderRecord, PeakRecord
from weft.core.terms import MemoryTerm as Term
from weft.engine.measure.flops import FlopCounter
from weft.engine.measure.memory_terms import LARGEST, holders_of, teacher_of
from weft.engine.measure.module_watch import ModuleWatch
from weft.engine.measure.tracker import Live, MemoryTracker, Moment, Peak

if TYPE_CHECKING:
    from weft.engine.engine import Engine


NEAR = 0.99


@contextmanager
def collecting_new_objects() -> Iterator[None]:
    """The meter collects cycles between steps: a fifth of a second each with all of torch in it. Within, collections
    skip what exists already."""
    if gc.get_freeze_count():  # the caller does the same
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class StepMeter:
    """`with meter.measuring():` around a step or several, `meter.next_step()` before each; then `peak`, `traffic`, …

    Create it between two steps, when no parameter is gathered. The options are those of `MemoryTracker`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        workspace: Callable[[Any, Any], int] | None = None,
        allocated: Callable[[int, int], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """`on_error` gets errors of the measurement itself, which then end it and not the step."""
        self._engine = engine
        self._on_error = on_error
        self._weights = list(engine.model.parameters())
        self._modules = ModuleWatch(engine.model, closed=engine.layout.blocks if engine.plan.compile.enabled else ())
        self._tracker = MemoryTracker(
            device_type=engine.device.type,
            look=self._look,
            module=self._modules.current,
            workspace=workspace,
            allocated=allocated,
            is_in_backward=self._is_in_backward,
        )
        topology = engine.topology
        axes = topology.group_axes | engine.axes.group_axes
        if engine.axes:
            # the group of replicas, outside of the mesh: the ranks with equal stage and tp rank
            for group in (topology.dp_group, topology.gradient_group):
                axes.setdefault(str(group.group_name), DP_REPLICATE)
        self._ledger = TrafficLedger(axes=axes, phase=self._phase_of_traffic)
        self._flops = FlopCounter()
        self._predicted: Moment | None = None
        self._holders: list[HolderRecord] = []
        self._has_looked = False
        self._module = ""
        self.failed_in = ("", "")  # the phase and the module of an operator that raised

    def _is_in_backward(self) -> bool:
        return self._engine.runner.is_in_backward

    def _phase_of_traffic(self) -> str:
        return "update" if self._engine.is_updating else self._tracker.phase

    @contextmanager
    def measuring(self) -> Iterator[None]:
        gc.collect()  # a cycle of the step before would count as alive
        self._tracker.start(tensors_at_rest(self._engine))
        watch = OperatorWatch(
            self._tracker, self._ledger, self._flops, on_error=self._on_error, on_failure=self._note_failure
        )
        with self._modules.watching(), self._tracker.following(), watch, self._phases():
            yield

    def next_step(self) -> None:
        """A step begins: reset all counts, except the moment of the peak."""
        self._predicted = self._tracker.peak.moment if self._tracker.peak.nbytes else None
        self._has_looked = False
        self._tracker.reset(look_at=self._predicted)
        self._modules.reset()
        self._ledger.clear()
        self._flops.total = 0

    @property
    def is_exact(self) -> bool:
        """Whether this step's peak was at the predicted moment."""
        return self._predicted is not None and self._tracker.peak.moment == self._predicted

    @property
    def is_complete(self) -> bool:
        """Whether about as much was live there as at the peak: real steps free a little sooner or later."""
        looked_bytes = sum(holder.nbytes for holder in self._holders) if self._has_looked else 0
        return self.is_exact or looked_bytes >= NEAR * self._tracker.peak.nbytes > 0

    @property
    def live_bytes(self) -> int:
        """Bytes that are live now."""
        return self._tracker.current_bytes

    @property
    def traffic(self) -> list[dict[str, Any]]:
        return self._ledger.rows()

    @property
    def collective_seconds(self) -> dict[tuple[str, str], float]:
        """By (axis, collective), from issue to completion, if the backend reports it."""
        return self._ledger.seconds()

    @property
    def flops(self) -> int:
        return self._flops.total

    @property
    def peak(self) -> PeakRecord:
        """The peak of the last step. If its moment was not predicted, the terms are those of the step before."""
        found: Peak = self._tracker.peak
        terms: Counter[str] = Counter()
        for holder in self._holders:
            terms[holder.term] += holder.nbytes
        if found.workspace_bytes:
            terms[str(Term.TEMPORARIES)] += found.workspace_bytes
        return PeakRecord(
            peak_bytes=sum(terms.values()),
            terms={term: nbytes for term, nbytes in terms.most_common() if nbytes},
            phase=found.moment.phase,
            module=self._module,
            operator=found.moment.operator,
            largest=tuple(self._holders[:LARGEST]),
        )

    def holders_now(self) -> list[HolderRecord]:
        """The holders of the bytes live now, for example after a failed allocation."""
        return holders_of(self._engine, self._tracker.live, weights=self._weights)

    def _note_failure(self) -> None:
        self.failed_in = (self._tracker.phase, self._modules.current())

    def _look(self, live: dict[int, Live]) -> None:
        self._has_looked = True
        self._holders = holders_of(self._engine, live, weights=self._weights)
        self._module = self._modules.current()

    @contextmanager
    def _phases(self) -> Iterator[None]:
        """Set the phases forward and update by hooks of the optimizer; the tracker detects the backward itself."""
        tracker, optimizer = self._tracker, self._engine.optimizer
        tracker.phase = "forward"
        offload = self._engine.offload
        if offload is not None:
            offload.on_step = lambda is_begin: setattr(tracker, "phase", "update" if is_begin else "forward")
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: setattr(tracker, "phase", "update")),
            optimizer.register_step_post_hook(lambda *_: setattr(tracker, "phase", "forward")),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            if offload is not None:
                offload.on_step = None


def measure_peak(
    action: Callable[[], object], *, device_type: str, at_rest: Iterable[torch.Tensor] = (), **options: Any
) -> int:
    """The peak of live bytes while `action` runs, `at_rest` included."""
    tracker = MemoryTracker(device_type=device_type, **options)
    tracker.start(at_rest)
    with tracker.following(), OperatorWatch(tracker):
        action()
    return max(tracker.peak.nbytes, tracker.current_bytes)


def tensors_at_rest(engine: Engine) -> list[torch.Tensor]:
    """The tensors that an engine holds between two steps."""
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    host = engine.inputs.host_tensors()  # of a CPU: the device's own memory
    strategy = engine.strategy
    found = (*engine.model.parameters(), *engine.model.buffers(), *states, *strategy.gradient_buckets(), *host)
    found = (*found, *strategy.errors.values())
    if (teacher := teacher_of(engine)) is not None:
        found = (*found, *teacher.parameters(), *teacher.buffers())
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
