"""--set of `weft plan`: keys of the plan that a search keeps, and two of the run that change the cost of every plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.cli.resolve import require_known_sections
from weft.core.config import apply_settings, parse, read_toml
from weft.core.errors import BadValueError, InputError, WeftError
from weft.core.plan import SECTIONS, Plan
from weft.core.run_spec import RunSpec
from weft.plan.space import check_fixed


def keys_beside(
    option: str, command: str, *, settings: list[str], refused: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """(model.attention if set, the fixed keys) of an `option` that replaces the search.

    `refused`: options that have no meaning beside it, if given."""
    for other, value in refused.items():
        if value:
            raise InputError(f"{option} cannot be combined with {other}", hint=f"{command} alone")
    attention, settings = attention_of(settings)
    fixed = fixed_keys(settings)
    require_settable(fixed)
    return attention, fixed


def require_settable(fixed: Mapping[str, Any]) -> None:
    """Refuse keys and values that no search has."""
    for sentence, hint in check_fixed(fixed):
        raise BadValueError(f"--set: {sentence}", hint=hint)


def attention_of(settings: list[str]) -> tuple[str | None, list[str]]:
    """(model.attention if set, the other settings): a key of run.toml that changes a plan's cost and has no option."""
    named, settings = _taken(settings, "model", "attention")
    return None if named is None else str(named), settings


def document_length_of(model: str, settings: list[str]) -> tuple[float | None, list[str]]:
    """(the mean length of the document that a token is in, the other settings).

    As set by data.document_length; else of the rows of a run.toml whose documents do not attend to each other and whose
    tokens are cached."""
    given, settings = _taken(settings, "data", "document_length")
    if given is None:
        return _cached_document_length(model), settings
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise BadValueError(f"data.document_length = {given!r} is not a number", hint="give a mean length in tokens")
    return float(given), settings


def fixed_keys(settings: list[str]) -> dict[str, Any]:
    """--set section.key=value as {"section.key": value}, checked against plan.toml's keys."""
    require_known_sections(settings, known=SECTIONS)
    tables = apply_settings({}, settings)
    parse(Plan, tables, source="--set")
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def _cached_document_length(model: str) -> float | None:
    if not model.endswith(".toml"):
        return None
    run = RunSpec.from_tables(read_toml(Path(model)), source=model)
    if not run.data.trains_isolated:
        return None
    from weft.data.document_length import find_document_length  # loads torch

    try:
        return find_document_length(run.data)
    except WeftError:  # a plan needs no data: it may be made on another machine
        return None


def _taken(settings: list[str], section: str, key: str) -> tuple[Any, list[str]]:
    """(the value of a key of run.toml if set, the other settings)."""
    given = [one for one in settings if one.partition("=")[0].strip() == f"{section}.{key}"]
    return apply_settings({}, given).get(section, {}).get(key), [one for one in settings if one not in given]
