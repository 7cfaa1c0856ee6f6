"""Refuses rows of several documents for a model that is not known to isolate them (`core/isolation.py`), or whose
rotary embedding follows the longest of them. Rules of the plan judge the model of a run before ranks start; a teacher,
or a caller's own model, is asked here.
"""

from __future__ import annotations

from torch import nn

from weft.core.data_spec import DataSpec
from weft.core.errors import ModelError, NotBuiltError
from weft.core.isolation import why_not_isolated
from weft.models.positions import switching_reasons


def require_isolation(data: DataSpec, model: nn.Module) -> None:
    """Refuse rows of several documents for models whose documents would silently attend to each other."""
    if not data.isolates:
        return
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", type(model).__name__)
    reason = why_not_isolated(family, frozenset(getattr(config, "layer_types", None) or ()))
    if reason is not None:
        raise NotBuiltError(reason[0], hint=reason[1])
    for sentence, hint in switching_reasons(data, config):
        raise ModelError(sentence, hint=hint)
