"""`EngineRecords`: what an engine says about itself: coverage, notes, buffers, dtypes."""

from __future__ import annotations

from torch import nn

from weft.core.records import BufferRecord, DtypeRecord, ParameterRecord
from weft.engine.axis import Axes
from weft.engine.buffers.sync import BufferSync
from weft.engine.measure.dtypes import DtypeWatch
from weft.engine.mesh import Topology
from weft.engine.ownership import LocalShards, parameter_records
from weft.models.layout import ModelLayout


class EngineRecords:
    """See the module; `Engine` sets the attributes."""

    model: nn.Module
    layout: ModelLayout
    topology: Topology
    axes: Axes
    shards: LocalShards
    buffer_sync: BufferSync
    _notes: tuple[str, ...]
    _dtypes: DtypeWatch

    def coverage(self) -> list[ParameterRecord]:
        """Which parameters are sharded on which axes and which stayed replicated."""
        names_of, reasons = self.topology.axis_names_of, self.axes.replicated_reasons
        return parameter_records(self.model, self.layout, names_of, shards=self.shards, reasons=reasons)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to the user about this model and plan; after the first step also about buffers that change."""
        return (*self._notes, *self.buffer_sync.notes())

    def buffers(self) -> list[BufferRecord]:
        """Which buffers are constants, and how ranks keep the others equal; known after the first step."""
        return self.buffer_sync.records()

    def dtypes(self) -> list[DtypeRecord]:
        """The dtypes really used, looked up during the first step; empty before it."""
        return self._dtypes.records()
