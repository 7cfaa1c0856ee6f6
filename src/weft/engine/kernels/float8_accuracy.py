"""How far float8 codes are from the values they stand for: sums over the operands of each layer in a measured step.

    error       the mean of |restored - value| / |value| over values that are not zero; a value that becomes 0 has 1
    overflow    the share of values larger than the largest code, which saturate
    underflow   the share of values that become 0

Values count alike: in a norm of the whole operand an outlier hides that it has left the other values no code. All are
quotients of sums over micro-batches, ranks and parts of a matrix, so they are the same in every layout. The sums of a
weight count once per row that it multiplies: experts multiply on the ranks where rows arrive. A recomputed forward adds
nothing.

A layer whose error is larger than `float8.fallback_error` computes in the unquantised format from the next step on. All
ranks decide by the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from weft.comm.groups import sum_over
from weft.comm.observer import buffer_collectives
from weft.core.float8_section import Float8
from weft.core.records import OPERANDS
from weft.engine.activations.recomputing import is_recomputing
from weft.engine.kernels.float8_delayed import DelayedScale, DelayedScales
from weft.engine.kernels.float8_operands import E2M1_MOST, Operand, Role

_ROLES: tuple[Role, ...] = ("activation", "weight", "gradient")  # as OPERANDS
_NUM_SUMS = 4  # relative errors; values larger than the largest code, that become 0, that are not zero
_BEYOND = 1 + 2.0**-10  # rounding of the scale itself is no overflow
_CHUNK_ELEMENTS = 1 << 22  # of float32 copies
NUM_WORST = 12  # rows of the table
_measured: list[Float8Layers] = []  # not of a thread: backwards have their own


def is_measuring() -> bool:
    """Whether the operands of this step are summed; compiled code would not see it change."""
    return bool(_measured)


class LayerAccuracy:
    """The sums of one weight's products, [roles, sums], and whether they are computed unquantised."""

    def __init__(self, sums: Tensor, recipe: str) -> None:
        self.sums, self._recipe, self.is_plain = sums, recipe, False

    def add(self, role: Role, values: Tensor, operand: Operand, *, times: int = 1) -> None:
        """Compare the codes of `operand` with `values` [rows, columns]."""
        if not is_measuring() or is_recomputing():
            return
        rows, columns = values.shape
        most = E2M1_MOST if self._recipe == "nvfp4" else torch.finfo(operand.codes.dtype).max
        codes, scales = operand.codes[:rows], operand.row_scales.expand(rows, -1)
        rows_at_once = max(1, _CHUNK_ELEMENTS // max(1, columns))
        with torch.no_grad():
            for begin in range(0, rows, rows_at_once):
                at = slice(begin, begin + rows_at_once)
                part = Operand(codes[at], scales[at], (1, operand.block[1]))
                sums = _sums(values[at].float(), codes[at][:, :columns], part.restored()[:, :columns], most)
                self.sums[_ROLES.index(role)].add_(sums, alpha=times)


def _sums(values: Tensor, codes: Tensor, restored: Tensor, most: float) -> Tensor:
    size, made = values.abs(), restored.abs()
    errors = torch.where(size > 0, (restored - values).abs() / size, 0.0)
    is_beyond = (codes.float().abs() >= most) & (size > made * _BEYOND)
    sums = [errors, is_beyond, (size > 0) & (made == 0), size > 0]
    return torch.stack([one.sum(dtype=torch.float64) for one in sums])


Quotients = dict[str, list[float]]  # by operand: error, overflow, underflow


class Float8Layers(dict[str, bool]):
    """Layers of this rank by name, and whether they multiply in float8; their accuracy, if it is measured.

    `names`: layers of all ranks in one order, those of other stages of a pipeline too.
    """

    def __init__(self, float8: Float8, names: Sequence[str], *, device: torch.device) -> None:
        super().__init__()
        self._every, self._limit = float8.measure_every, float8.fallback_error
        self._names = tuple(names) if self._every else ()
        self._sums = torch.zeros(len(self._names), len(_ROLES), _NUM_SUMS, dtype=torch.float64, device=device)
        rows = zip(self._names, self._sums, strict=True)
        self._layers = {name: LayerAccuracy(sums, float8.recipe) for name, sums in rows}
        self._unquantised: dict[str, int] = {}  # layers that fell back, and the step after which
        self._last: dict[str, tuple[int, Quotients]] = {}  # the newest figures of each layer, and their step
        self._delayed: DelayedScales | None = None
        if float8.linears != "none" and float8.recipe == "delayed":
            self._delayed = DelayedScales(names, length=float8.amax_history, margin=float8.margin, device=device)
        self.figures: dict[str, Any] = {}  # of the last step, as fields of a StepRecord

    def accuracy_of(self, name: str) -> LayerAccuracy | None:
        return self._layers.get(name)

    def delayed_of(self, name: str) -> DelayedScale | None:
        return self._delayed.of(name) if self._delayed is not None else None

    def finish_step(self, *, is_skipped: bool) -> None:
        """Set the delayed scales of the next step. Collective."""
        if self._delayed is not None:
            self._delayed.finish_step(is_skipped=is_skipped)

    @contextmanager
    def watching(self, steps_done: int) -> Iterator[None]:
        """Around a step; every `measure_every`th one is measured. Its end is collective. Dry runs measure none."""
        with self._delayed.recording() if self._delayed is not None else nullcontext(), self._measuring(steps_done):
            yield

    @contextmanager
    def _measuring(self, steps_done: int) -> Iterator[None]:
        step, self.figures = steps_done + 1, {}
        if not self._names or step % self._every or active_fake_mode() is not None:
            yield
            return
        self._sums.zero_()
        _measured.append(self)
        try:
            yield
        finally:
            _measured.remove(self)
        self._finish(step)

    def _finish(self, step: int) -> None:
        total = self._sums.clone()
        with buffer_collectives():
            sum_over(total, None)
        sums = dict(zip(self._names, total.tolist(), strict=True))
        found = {name: _quotients(rows) for name, rows in sums.items() if any(map(any, rows))}
        if not found:
            return
        fallen = [name for name, row in found.items() if self._limit and not worst_error(row) <= self._limit]
        self._fall_back(dict.fromkeys(fallen, step))
        self._last |= {name: (step, row) for name, row in found.items()}
        operands = [operand for row in found.values() for operand in row.values()]
        self.figures = {
            "float8_error": max(error for error, _, _ in operands),
            "float8_overflow": max(overflow for _, overflow, _ in operands),
            "float8_underflow": max(underflow for _, _, underflow in operands),
            "float8_fallback": tuple(fallen) or None,
            "float8_layers": {name: _shortened(row) for name, row in found.items()},
        }

    def _fall_back(self, steps: Mapping[str, int]) -> None:
        self._unquantised |= steps
        for name in steps:
            if name in self._layers:
                self._layers[name].is_plain = True

    def summary(self) -> dict[str, Any] | None:
        """The layers with the largest errors at their last measured step, and those that fell back; for the ledger."""
        if not self._names:
            return None
        ranked = sorted(self._last.items(), key=lambda item: -worst_error(item[1][1]))
        rows = [{"layer": name, "step": step, **_shortened(row)} for name, (step, row) in ranked[:NUM_WORST]]
        fallen = [{"layer": name, "step": step} for name, step in self._unquantised.items()]
        return {"num_layers": len(self._last), "worst": rows, "unquantised": fallen, "limit": self._limit}

    # --- state --------------------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, int]:
        """Layers that fell back, and the step after which."""
        return dict(self._unquantised)

    def delayed_scalars(self) -> dict[str, str]:
        """The amax of the last steps, by layer."""
        return self._delayed.scalars() if self._delayed is not None else {}

    def restore_delayed(self, scalars: Mapping[str, Any]) -> None:
        if self._delayed is not None:
            self._delayed.restore(scalars)

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """A run without `fallback_error` begins with all layers in float8."""
        for name in self._unquantised:
            self._layers[name].is_plain = False
        self._unquantised = {}
        if self._limit:
            self._fall_back({name: int(step) for name, step in scalars.items() if name in self._layers})


def _quotients(rows: Sequence[Sequence[float]]) -> Quotients:
    """By operand, without those of zeros alone."""
    return {
        operand: [error / count, beyond / count, lost / count]
        for operand, (error, beyond, lost, count) in zip(OPERANDS, rows, strict=True)
        if count
    }


def _shortened(row: Quotients) -> Quotients:
    return {operand: [float(f"{figure:.4g}") for figure in figures] for operand, figures in row.items()}


def worst_error(row: Quotients) -> float:
    return max(error for error, _, _ in row.values())
