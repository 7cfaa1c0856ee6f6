"""`[track]`: trackers beside metrics.jsonl and TensorBoard."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.core.config import Section

TrackerName = Literal["wandb", "mlflow", "trackio"]


class TrackSpec(Section):
    """Trackers that rank 0 writes to as well. One that fails is reported once and left out; the run goes on."""

    kind: list[TrackerName] = Field(
        default_factory=list, description="any of wandb, mlflow, trackio (each an extra of this package); [] is none"
    )
    project: str = Field(default="weft", min_length=1, description="the project, or MLflow's experiment")
    name: str = Field(default="", description="the run's name there; empty: that of the run folder")
    offline: bool | None = Field(
        default=None,
        description="keep everything in the run folder; absent: only if the tracker's server cannot be reached. "
        "Variables of the tracker (WANDB_MODE, MLFLOW_TRACKING_URI) go first",
    )
