"""From options to a run and the tables of a plan, without torch: files, then --set. `plan.resolve` does the rest."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft import zoo
from weft.core import plan as plans
from weft.core import run_spec as runs
from weft.core.config import apply_settings, read_toml
from weft.core.errors import UnknownKeyError
from weft.core.plan import Plan
from weft.core.run_spec import DEFAULT_RUN, RunSpec


def resolve_run(path: Path | None, settings: list[str]) -> RunSpec:
    """The run of a file, or the embedded default, with settings applied."""
    tables = read_toml(path) if path is not None else DEFAULT_RUN
    source = str(path) if path is not None else "the embedded default"
    return RunSpec.from_tables(apply_settings(tables, _for(settings, runs.SECTIONS)), source=source)


def resolve_model(model: str | None, settings: list[str], *, rows: int = 1) -> RunSpec:
    """A run for any model that `weft plan` takes: a run.toml, a name, a config.json or a folder with one.

    Without a run.toml: the longest sequences of the model up to MAX_DEFAULT_SEQUENCE, `rows` of them per step.
    """
    if model is None or model.endswith(".toml"):
        return resolve_run(Path(model) if model is not None else None, settings)
    from weft.plan import ask  # imports numpy, which `weft train` does not need

    shape, _ = ask.resolve_model(model)
    sequence_length = min(shape.max_positions or ask.MAX_DEFAULT_SEQUENCE, ask.MAX_DEFAULT_SEQUENCE)
    tables = {
        "model": _model_tables(model),
        "data": {"sequence_length": sequence_length},
        "train": {"global_batch": rows},
    }
    return RunSpec.from_tables(apply_settings(tables, _for(settings, runs.SECTIONS)), source=model)


def _model_tables(model: str) -> dict[str, Any]:
    path = Path(model)
    if path.exists():
        return {"path": str(path.parent if path.is_file() else path)}
    model_type, config = zoo.config_named(model)
    return {"type": model_type, "config": config}


def plan_tables(path: Path | None, settings: list[str]) -> dict[str, Any]:
    """The tables of plan.toml, or none, with settings applied."""
    return apply_settings(read_toml(path) if path is not None else {}, _for(settings, plans.SECTIONS))


def resolve_resumed(
    folder: Path, plan_path: Path | None, settings: list[str], *, num_ranks: int | None
) -> tuple[RunSpec, dict[str, Any]]:
    """The folder's run and plan with the given changes; another number of ranks drops the old mesh."""
    run = resolve_run(folder / "run.toml", settings)
    if plan_path is not None:
        return run, plan_tables(plan_path, settings)
    old = read_toml(folder / "plan.toml")
    sets_mesh = any(setting.startswith("mesh.") for setting in settings)
    before = Plan.from_tables(old)
    if num_ranks not in (None, before.num_ranks) and not sets_mesh and not before.data_parallel.elastic:
        old.pop("mesh", None)
    if sets_mesh:
        old["mesh"] = {}
    return run, apply_settings(old, _for(settings, plans.SECTIONS))


def require_known_sections(settings: list[str], *, known: Sequence[str] = (*runs.SECTIONS, *plans.SECTIONS)) -> None:
    """Raise UnknownKeyError for a section that no document has."""
    for setting in settings:
        section = setting.partition("=")[0].partition(".")[0].strip()
        if section not in known and "=" in setting:
            near = difflib.get_close_matches(section, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownKeyError(f"--set: there is no section {section!r}", hint=f"{hint}sections: {', '.join(known)}")


def _for(settings: list[str], sections: tuple[str, ...]) -> list[str]:
    """The settings of these sections, and malformed ones, which the parser refuses."""
    return [setting for setting in settings if setting.partition(".")[0].strip() in sections or "=" not in setting]
