"""`weft new`, groups and examples of `weft --help`, and shell completion."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from pydantic import BaseModel

from weft.cli.groups import EXAMPLES, GROUPS
from weft.cli.main import app
from weft.cli.new import NewFile, commented_file, new
from weft.core.config import Document
from weft.core.errors import InputError
from weft.core.json_files import parse_toml
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.server_spec import ServerRun

KINDS: dict[NewFile, tuple[type[Document], Document]] = {
    NewFile.RUN: (RunSpec, RunSpec.default()),
    NewFile.PLAN: (Plan, Plan.from_tables({})),
    NewFile.SERVER: (ServerRun, ServerRun.from_tables({})),
}


@pytest.mark.parametrize("kind", NewFile)
def test_a_new_file_is_the_default_with_every_key_and_its_meaning(kind: NewFile) -> None:
    document, default = KINDS[kind]
    text = commented_file(kind)
    assert document.from_tables(parse_toml(text)) == default
    words = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for name, description in meanings(default):
        assert f"{name}: {' '.join(description.split())}" in words
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("kind", NewFile)
def test_every_key_without_a_value_may_be_given_one(kind: NewFile) -> None:
    """Commented keys are at their place: below their own table's heading, above any other."""
    known = {f"{path}.{name}" for path, name in commented_keys(commented_file(kind))}
    document, _ = KINDS[kind]
    for key in known:
        section, name = document.model_fields[key.split(".")[0]].annotation, key.split(".")[1:]
        for part in name[:-1]:
            section = section.model_fields[part].annotation
        assert name[-1] in section.model_fields, key


def commented_keys(text: str) -> list[tuple[str, str]]:
    found, table = [], ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[([\w.]+)\]", line):
            table = heading[1]
        elif key := re.fullmatch(r"# (\w+) =", line):
            found.append((table, key[1]))
    return found


def meanings(section: BaseModel) -> list[tuple[str, str]]:
    found = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        found += meanings(value) if isinstance(value, BaseModel) else [(name, str(field.description))]
    return found


def test_files_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new(None, out=None, as_json=False)
    assert RunSpec.from_file("run.toml") == RunSpec.default()
    assert Plan.from_file("plan.toml") == Plan.from_tables({})
    with pytest.raises(InputError, match=r"run\.toml exists already") as caught:
        new(NewFile.RUN, out=None, as_json=False)
    assert caught.value.hint
    with pytest.raises(InputError, match="one file"):
        new(None, out=tmp_path / "other.toml", as_json=False)
    new(NewFile.SERVER, out=tmp_path / "clicks.toml", as_json=False)
    assert ServerRun.from_file(tmp_path / "clicks.toml") == ServerRun.from_tables({})


def test_every_verb_is_in_one_group() -> None:
    named = [name for names in GROUPS.values() for name in names]
    assert sorted(named) == sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_name_verbs_and_options_that_exist(line: str) -> None:
    program, verb, *rest = shlex.split(line)
    command = typer.main.get_command(app).commands[verb]
    options = {name for parameter in command.params for name in parameter.opts}
    given = [word for word in rest[: rest.index("--") if "--" in rest else None] if word.startswith("--")]
    assert program == "weft"
    assert line in EXAMPLES[verb]
    assert set(given) <= options


def test_the_shell_completes_verbs_and_options() -> None:
    for words, completed in {"weft tr": "train", "weft train --max": "--max-restarts"}.items():
        asked = {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = subprocess.run(
            [sys.executable, "-c", "import sys; sys.argv[0] = 'weft'; from weft.cli.main import main; main()"],
            env={**os.environ, **asked},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == [completed]
