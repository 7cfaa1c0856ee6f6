"""The zoo of named models: data/models/*.toml, one entry a model (its type and what differs from the type's defaults).

Not a hub client: nothing is downloaded. A name's leading letters are the file to look in, so a name costs one file;
names, aliases and hub names match without regard to case and punctuation: "meta-llama/Llama-3.1-8B" is "llama-3.1-8b".
"""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from weft.core.errors import ModelError
from weft.core.model_shape import ModelShape
from weft.core.shape_json import shape_from_json

_FOLDER = Path(__file__).parent / "data" / "models"
# endings of hub names that do not change the sizes
_ENDINGS = re.compile(r"(-(instruct|chat|base|hf|it|pt|text|v0\.1))+$")


def named(name: str) -> ModelShape:
    """The shape of a well-known model; an unknown name is a ModelError with the nearest ones."""
    key, file = _find(name)
    return shape_from_json(_shapes(file)[key])


def config_named(name: str) -> tuple[str, dict[str, Any]]:
    """(model type, config values) of a well-known model, its vocabulary always among them."""
    key, file = _find(name)
    entry = _load(file)[key]
    return str(entry["type"]), {"vocab_size": named(key).vocab_size, **config_of(entry)}


def names() -> list[str]:
    return sorted(name for file in _files() for name in _load(file))


def entries() -> dict[Path, dict[str, dict[str, Any]]]:
    """All models by file."""
    return {file: _load(file) for file in _files()}


def shapes_file(file: Path) -> Path:
    """The generated shapes (scripts/generate_shapes.py) of the models in `file`."""
    return file.parents[1] / "shapes" / f"{file.stem}.json"


@cache
def _shapes(file: Path) -> dict[str, Any]:
    return json.loads(shapes_file(file).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _find(name: str) -> tuple[str, Path]:
    wanted = _spellings(name)
    for file in _likely_first(wanted):
        for key, entry in _load(file).items():
            if wanted & _answers_to(key, entry):
                return key, file
    raise _unknown(name)


def config_of(entry: dict[str, Any]) -> dict[str, Any]:
    # TOML has no null: "null" stands for a value that config.json sets to null
    return {key: None if value == "null" else value for key, value in entry.get("config", {}).items()}


def _spellings(name: str) -> set[str]:
    last = name.strip().lower().rsplit("/", 1)[-1]
    return {_plain(last), _plain(_ENDINGS.sub("", last))}


def _answers_to(key: str, entry: dict[str, Any]) -> set[str]:
    known = (key, *entry.get("aliases", ()), str(entry.get("source", "")).lower().rsplit("/", 1)[-1])
    return {_plain(spelling) for spelling in known if spelling}


def _plain(text: str) -> str:
    """Letters and digits; a dot between digits stays a mark, or 1.5b would be 15b."""
    dotted = re.sub(r"(?<=\d)\.(?=\d)", "p", text.lower())
    return re.sub(r"[^a-z0-9]", "", dotted)


def _likely_first(wanted: set[str]) -> list[Path]:
    stems = {match.group() for spelling in wanted if (match := re.match(r"[a-z]+", spelling))}
    return sorted(_files(), key=lambda file: file.stem not in stems)


@cache
def _files() -> list[Path]:
    return sorted(_FOLDER.glob("*.toml"))


@cache
def _load(file: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _unknown(name: str) -> ModelError:
    import difflib

    known = {_plain(known): known for known in names()}
    near = difflib.get_close_matches(_plain(name.rsplit("/", 1)[-1]), known, n=3, cutoff=0.5)
    listed = ", ".join(known[match] for match in near)
    hint = (
        f"the nearest names are {listed}" if listed else "give a config.json, or one of the names of weft.zoo.names()"
    )
    return ModelError(f"there is no model named {name!r}", hint=hint)
