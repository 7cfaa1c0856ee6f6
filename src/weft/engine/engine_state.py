"""`EngineState`: the part of an engine that checkpoints hold, and its way to and from them.

state      tensors under logical names, which share memory with the live ones
scalars    JSON values; restoring them is what makes training continue from the tensors
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.core.plan import Plan
from weft.engine.activations.kept_inputs import KeptInputs
from weft.engine.axis import Axes
from weft.engine.buffers.sync import BufferSync
from weft.engine.dp.strategy import Strategy
from weft.engine.kernels.float8_accuracy import Float8Layers
from weft.engine.mesh import Topology
from weft.engine.offload.offloaded import OffloadedStates
from weft.engine.optim.averages import averages_of, exchanged
from weft.engine.optim.optimizers import create_state
from weft.engine.optim.schedule_free import evaluation_points
from weft.engine.ownership import LocalShards
from weft.engine.precision import LossScale
from weft.engine.router.routers import Routers
from weft.engine.state import MODEL, OPTIMIZER, error_tensors, master_tensors, meta_read, state_tensors
from weft.engine.step_guard import NoGuard
from weft.engine.updates import Updates
from weft.models.adapter.lora import names_elsewhere
from weft.models.layout import ModelLayout


class EngineState:
    """See the module; `Engine` sets the attributes."""

    plan: Plan
    model: nn.Module
    layout: ModelLayout
    topology: Topology
    axes: Axes
    shards: LocalShards
    trained: Mapping[str, nn.Parameter]
    parameters: Sequence[nn.Parameter]
    optimizer: Optimizer
    offload: OffloadedStates | None
    loss_scale: LossScale
    updates: Updates
    routers: Routers
    float8: Float8Layers
    buffer_sync: BufferSync
    inputs: KeptInputs
    steps_done: int
    strategy: Strategy
    _notes: tuple[str, ...]
    guard: NoGuard = NoGuard()  # asked before every update

    @property
    def masters(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """Masters that are offloaded states; all other parameters are their own."""
        return self.offload.masters if self.offload is not None else {}

    def weights(self) -> dict[str, torch.Tensor]:
        """What the optimizer updates, by parameter name, as checkpoints hold it."""
        return master_tensors(self.model, self.shards, self.masters)

    @contextmanager
    def average_weights(self, *, is_on: bool = True) -> Iterator[None]:
        """Averages of the weights in their place, for evaluations: the exponential ones, or those of schedule-free
        AdamW. Collective."""
        if not is_on:
            yield
            return
        self.updates.restart()
        with exchanged(averages_of(self.optimizer) or evaluation_points(self.optimizer)):
            self.strategy.after_evaluation()  # nothing gathered before may be read
            yield
        self.strategy.after_evaluation()

    def host_terms(self) -> dict[str, int]:
        """Bytes of this rank in the host's memory, by the planner's terms (plan/memory/offloaded.py)."""
        states = self.offload.memory.outside.host if self.offload is not None else {}
        activations = self.inputs.slots.nbytes
        return {**states, **({"activations": activations} if activations else {})}

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor of model and optimizer under its logical name, sharing memory with the live ones; after they are
        written, `restore_scalars` makes training continue from them. A pipeline that never flushes restarts from here,
        as it does after loading this state; a delayed update is applied."""
        self.updates.restart()
        create_state(self.optimizer, self.parameters)
        state = state_tensors(self.model, self.optimizer, self.shards, self.masters)
        elsewhere = names_elsewhere(self.model)
        state = {
            key: value
            for key, value in state.items()
            if not self.buffer_sync.is_foreign(name := key.removeprefix(MODEL)) and name not in elsewhere
        }
        copied = tuple(f"{prefix}{name}" for prefix in (MODEL, OPTIMIZER) for name in self.layout.copies)
        if copied:
            state = {key: value for key, value in state.items() if not key.startswith(copied)}
        return state | error_tensors(self.strategy.errors, self.plan.mesh, rank=dist.get_rank())

    def scalars(self) -> dict[str, Any]:
        """The rest of the state, as JSON values."""
        late, router, scale = self.updates.scalars(), self.routers.scalars(), self.loss_scale.state()
        fallen, amax = self.float8.scalars(), self.float8.delayed_scalars()
        found = {"steps_done": self.steps_done, "loss_scale": scale, "late_norms": late, "router": router}
        return {**found, **({"float8": fallen} if fallen else {}), **({"float8_amax": amax} if amax else {})}

    def restore_scalars(self, scalars: Mapping[str, Any]) -> None:
        self.steps_done = int(scalars["steps_done"])
        self.loss_scale.restore(scalars["loss_scale"])
        self.updates.restore(scalars.get("late_norms", {}))
        self.routers.restore(scalars.get("router", {}))
        self.float8.restore(scalars.get("float8", {}))
        self.float8.restore_delayed(scalars.get("float8_amax", {}))
        self.axes.after_load(self.trained, self.optimizer, self.masters)
        if self.offload is not None:
            self.offload.refresh_weights()
        self.buffer_sync.restart()

    def restore_meta(self, meta: Mapping[str, Any]) -> None:
        """`restore_scalars` from the key "engine" of a checkpoint's `meta`."""
        with meta_read():
            self.restore_scalars(meta["engine"])
        if self.offload is not None:
            self.offload.memory.after_load()

    def save(self, directory: str | Path) -> None:
        """Commit a checkpoint under `directory`; returns when it is safe on disk."""
        store = self._store(directory)
        store.save(self.state(), {"engine": self.scalars()}, step=self.steps_done, asynchronous=False)
        store.wait()

    def export(self, directory: str | Path, *, ema: bool = False) -> None:
        """Write the weights as a new Hugging Face folder, or their average; the model needs a config. Collective.

        A checkpoint beside it is written and removed again: no rank holds the full model."""
        from weft.engine.export import export_engine

        export_engine(self, Path(directory), ema=ema)

    def load(self, directory: str | Path) -> int:
        """Load the newest good checkpoint under `directory`, from any layout; returns its step."""
        loaded = self._store(directory).load(self.state())
        self.restore_meta(loaded.meta)
        self._notes = (*self._notes, *loaded.notes)
        return int(loaded.step)

    def _store(self, directory: str | Path) -> Any:
        from weft.checkpoint import CheckpointStore

        return CheckpointStore(Path(directory), process_group=self.topology.checkpoint_group())
