"""Answers about a run's model, kept: verbs judge many plans of one run, and each answer builds or reads the model.

key = run.toml as text + the config file that [model] names
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import TypeVar

from weft.core.errors import WeftError
from weft.core.run_spec import RunSpec
from weft.zoo.hub import model_folder

_MOST_RUNS = 8
T = TypeVar("T")


@dataclass(frozen=True)
class _Asked:
    """A run that equals another if its model is the same one: run specs hold tables, which have no hash."""

    key: str
    run: RunSpec = field(compare=False)


def kept_per_run(answer: Callable[[RunSpec], T]) -> Callable[[RunSpec], T]:
    """`answer`, computed once per run; one that raises is asked again."""

    @lru_cache(maxsize=_MOST_RUNS)
    def kept(asked: _Asked) -> T:
        return answer(asked.run)

    @wraps(answer)
    def ask(run: RunSpec) -> T:
        return kept(_Asked(run.model_dump_json() + _config_text(run), run))

    return ask


def _config_text(run: RunSpec) -> str:
    """The config file, which changes under its path: a folder is written anew, a hub name is downloaded."""
    if run.model.path is None:
        return ""
    try:
        return (model_folder(run.model.path, revision=run.model.revision) / "config.json").read_text(encoding="utf-8")
    except (WeftError, OSError, ValueError):
        return ""
