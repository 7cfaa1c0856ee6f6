"""A run's account: predicted and measured costs, and a warning where the two differ.

Rank 0 predicts and warns; every rank measures.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.data.document_length import document_length_of
from weft.train.build import Workbench
from weft.train.ledger.bounds import memory_warnings, traffic_warnings
from weft.train.ledger.ledger import measured_terms
from weft.train.ledger.measuring import Measured, Measuring
from weft.train.ledger.predicted import Prediction, predict
from weft.train.ledger.rows import memory_rows, traffic_rows
from weft.train.loggers.display import Display
from weft.train.parts import OwnRows


class Account:
    """`measuring` is used by the loop; `columns` by the ledger."""

    def __init__(self, run: RunSpec, bench: Workbench, plan: Plan, *, display: Display, is_main: bool) -> None:
        self.measuring = Measuring(bench.engine, is_on=run.ledger.measure, on_found=self._compare)
        self.prediction: Prediction | None = None
        self.warnings: list[str] = []
        self._display = display
        self._remarks: list[str] = []
        if is_main:
            self._predict(run, plan, bench)

    def columns(self) -> dict[str, Any]:
        """Arguments of `build_ledger`: predicted, measured, remarks, warnings."""
        return {
            "measured": self.measuring.found,
            "prediction": self.prediction,
            "remarks": [*self._remarks, *self.measuring.notes],
            "warnings": self.warnings,
        }

    def _predict(self, run: RunSpec, plan: Plan, bench: Workbench) -> None:
        device = bench.engine.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        length = _document_length(run, bench)
        self.prediction, why_not = predict(
            run, plan, config=bench.model_config, device_name=name, document_length=length
        )
        self._remarks += [why_not] if why_not else []

    def _compare(self, measured: Measured) -> None:
        """After the first complete measurement: one warning per term beyond its bound."""
        found = self.prediction
        if found is None or not found.is_binding:
            return
        self.warnings = [
            *memory_warnings(memory_rows(found, measured_terms(measured))),
            *traffic_warnings(traffic_rows(found, measured)),
        ]
        for warning in self.warnings:
            self._display.line(f"warning: {warning}")


def _document_length(run: RunSpec, bench: Workbench) -> float | None:
    """Of the run's rows, where their documents do not attend to each other."""
    if not run.data.trains_isolated or isinstance(bench.training, OwnRows):
        return None
    return document_length_of(bench.training)
