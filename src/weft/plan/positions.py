"""Whether rows of a run may be longer than its model's positions: asked of its config without torch; the model itself
answers (`models/positions.py`) only where they may."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from weft.core.errors import WeftError
from weft.core.quiet import quiet_libraries
from weft.core.run_spec import ModelSpec, RunSpec
from weft.plan.per_run import kept_per_run
from weft.zoo.hub import model_folder

_KEYS = frozenset({"n_positions", "max_position_embeddings", "original_max_position_embeddings"})
_FEWEST = 256  # positions of a type whose config does not state them: CTRL has the fewest
_SWITCHING = ("dynamic", "longrope")  # rotary types that follow the longest position


def position_reasons(run: RunSpec) -> list[tuple[str, str]]:
    """Reasons against the length of the run's rows, as (sentence, hint)."""
    try:
        stated = list(_stated(run.model))
    except (WeftError, OSError, ValueError):
        return []  # training says what is wrong with the folder
    numbers = [value for key, value in stated if key in _KEYS and isinstance(value, int)]
    switches = run.data.isolates and any(kind in str(value) for _, value in stated for kind in _SWITCHING)
    if run.data.sequence_length <= min(numbers, default=_FEWEST) and not switches:
        return []
    try:
        return _asked_of_model(run)
    except WeftError:
        return []  # as above, of a model that is not built


@kept_per_run
def _asked_of_model(run: RunSpec) -> list[tuple[str, str]]:
    quiet_libraries()  # they log while they are imported
    from weft.models.positions import check_positions

    return check_positions(run)


def _stated(model: ModelSpec) -> Iterator[tuple[str, Any]]:
    """The keys of [model.config], and of the config file beneath."""
    given: Mapping[str, Any] = model.config
    if model.path is not None:
        file = model_folder(model.path, revision=model.revision) / "config.json"
        given = {**json.loads(file.read_text(encoding="utf-8")), **given}
    yield from _flat(given)


def _flat(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value
