"""The matrices of a model's blocks, which Muon makes orthogonal: weights of linear layers and stacked experts.

Not among them: embeddings and head (outside of blocks), routers, convolutions, tables, and matrices of one row or
column, for which orthogonal would only mean normalised.
"""

from __future__ import annotations

import re

from torch import nn

from weft.models.layout import ROOT, ModelLayout
from weft.models.tp.roles import linear_facts

_ROUTER = re.compile(r"(^|\.)(router|gate|moe_router|classifier)$")
_STACKED = 3  # dimensions of experts: [experts, rows, columns]


def matrix_names(model: nn.Module, layout: ModelLayout) -> frozenset[str]:
    """The names of the parameters. Shapes may be those of local shards: only dimensions and sizes of one matter."""
    found = set()
    for prefix, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) or linear_facts(prefix, module) is not None
        is_experts = "expert" in prefix.rpartition(".")[2].lower() or "Experts" in type(module).__name__
        for key, parameter in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if parameter is None or layout.unit_of.get(name, ROOT) == ROOT or _ROUTER.search(prefix):
                continue
            is_matrix = is_linear and key == "weight" and parameter.ndim == _STACKED - 1
            if is_matrix or (is_experts and parameter.ndim == _STACKED):
                found.add(name)
    return frozenset(found)
