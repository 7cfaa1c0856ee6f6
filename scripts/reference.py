"""Writes docs/reference from the code itself: keys of run.toml, plan.toml, runs on servers; errors; the CLI's help.

    python scripts/reference.py [FOLDER]     (default: docs/reference)

tests/docs/test_reference.py generates the pages again and compares them with the committed ones.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import Any

import typer
import typer.testing
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from weft.cli.main import app
from weft.core.config import dump
from weft.core.errors import InputError, RunError, WeftError, error_classes
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.server_spec import ServerRun
from weft.launch.places.settings import LaunchSettings

NOTICE = "<!-- written by scripts/reference.py; edit the code, not this page -->"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs" / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    return {
        "run.md": document_page(
            RunSpec, "run.toml", "What is trained. Every key, with the value it has when left out."
        ),
        "plan.md": document_page(
            Plan,
            "plan.toml",
            "How it is laid out. Every key, with the value it has when left out. This version refuses\n"
            "some values by name (W204); docs/status.md lists them.",
        ),
        "server-run.md": document_page(
            ServerRun,
            "run.toml of parameter servers",
            "What `weft server train` trains, on how many servers and workers. Every key, with the value it has when\n"
            "left out; a document with a `[server]` table is such a run ([the guide](../guides/parameter-server.md)).",
        ),
        "launch.md": document_page(
            LaunchSettings,
            "launch.toml",
            "How a site runs jobs (`weft launch --settings`). Every key, with the value it has when left out.",
        ),
        "errors.md": errors_page(),
        "cli.md": cli_page(),
    }


def document_page(kind: type[BaseModel], name: str, opening: str) -> str:
    lines = [f"# {name}", "", NOTICE, "", opening, "Unknown keys are errors that name the nearest spelling."]
    plain = {key: field for key, field in kind.model_fields.items() if section_of(field) is None}
    if plain:
        lines += ["", "## Top level", "", *key_table(plain)]
    for key, field in kind.model_fields.items():
        section = section_of(field)
        if section is not None:
            lines += section_lines(section, key)
    if kind is RunSpec:
        lines += ["", "## The embedded default", "", "What `weft train` alone trains, with every key spelt out.", ""]
        lines += ["```toml", dump(RunSpec.default()).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def section_lines(section: type[BaseModel], key: str, defaults: BaseModel | None = None) -> list[str]:
    """The section's own keys, then the tables inside it; `defaults`: what the table around it has there."""
    inside = {name: field for name, field in section.model_fields.items() if section_of(field) is not None}
    plain = {name: field for name, field in section.model_fields.items() if name not in inside}
    lines = ["", f"## [{key}]", "", *section_doc(section), *key_table(plain, defaults)]
    for name, field in inside.items():
        lines += section_lines(section_of(field) or section, f"{key}.{name}", field.get_default())
    for name, field in plain.items():
        rows = row_of(field)
        if rows is not None:
            lines += ["", f"## [[{key}.{name}]]", "", *section_doc(rows), *key_table(dict(rows.model_fields))]
    return lines


def row_of(field: FieldInfo) -> type[BaseModel] | None:
    """The table that a list of tables has."""
    rows = (one for one in typing.get_args(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel))
    return next(rows, None)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def section_doc(section: type[BaseModel]) -> list[str]:
    """The class's own docstring; pydantic's inherited one says nothing about this table."""
    own = section.__dict__.get("__doc__")
    return [own.strip(), ""] if own else []


def key_table(fields: dict[str, FieldInfo], defaults: BaseModel | None = None) -> list[str]:
    rows = [
        f"| `{key}` | {escape(kind_of(field.annotation))} | {shown(default_of(key, field, defaults))} | "
        f"{escape(meaning_of(field))} |"
        for key, field in fields.items()
    ]
    return ["| key | kind | default | meaning |", "| --- | --- | --- | --- |", *rows]


def kind_of(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind_of(arguments[0])
    if origin is typing.Literal:
        return " | ".join(f"`{value}`" for value in arguments)
    if origin is None:
        return {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}.get(
            annotation.__name__, annotation.__name__
        )
    if origin in (list, tuple):
        return f"list of {kind_of(arguments[0])}"
    if origin is dict:
        return "table"
    return " or ".join(kind_of(one) for one in arguments if one is not type(None))


def default_of(key: str, field: FieldInfo, defaults: BaseModel | None) -> Any:
    return field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, key)


def shown(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "none" if value is None else "required"
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
    return f"`{text}`"


def meaning_of(field: FieldInfo) -> str:
    if not field.description:
        raise SystemExit(f"a field without a description: {field}")
    return field.description


def escape(text: str) -> str:
    return text.replace("|", "\\|")


def errors_page() -> str:
    lines = ["# Errors", "", NOTICE, ""]
    lines += [
        "Every error that a user can cause or see: one sentence, a code and a hint on stderr; with `--json` the same"
    ]
    lines += ["as one JSON object on stdout. Bad input ends with exit code 2, a failure while running with 3.", ""]
    lines += ["| code | error | exit code | meaning |", "| --- | --- | --- | --- |"]
    concrete = [cls for cls in error_classes() if cls not in (WeftError, InputError, RunError)]
    for cls in sorted(concrete, key=lambda one: one.code):
        lines.append(f"| {cls.code} | `{cls.__name__}` | {cls.exit_code} | {cls.__doc__} |")
    lines += ["", "W100 and W700 are the branches themselves: bad input of the command line or the environment, and an"]
    lines += ["unspecific failure while running. W000 is an unexpected error: please report it. `WEFT_DEBUG=1` shows"]
    lines += ["stack traces."]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    lines = ["# The command line", "", NOTICE, ""]
    lines += [
        "Exit codes: 0 success, 1 a negative answer (does not fit, is not verified), 2 bad input, 3 a failure while"
    ]
    lines += ["running. With `--json` data goes to stdout as JSON; messages always go to stderr.", ""]
    lines += ["| environment variable | effect |", "| --- | --- |"]
    lines += ["| `WEFT_DEBUG=1` | shows stack traces and the warnings of other libraries |"]
    lines += ["| `WEFT_CALIBRATION` | measurements that replace the catalogue's figures in `weft plan` |"]
    lines += ["| `XDG_CACHE_HOME` | tokenised data is in its folder `weft`; default `~/.cache` |"]
    for arguments in [[], *verbs(app)]:
        title = " ".join(["weft", *arguments])
        lines += ["", f"## {title}", "", "```text", help_text(arguments), "```"]
    return "\n".join(lines) + "\n"


def verbs(of: typer.Typer) -> list[list[str]]:
    """Every verb, and every verb of a verb, as words."""
    found = [[command.name or command.callback.__name__] for command in of.registered_commands if command.callback]
    for group in of.registered_groups:
        inner = group.typer_instance
        if inner is not None:
            found += [[str(inner.info.name), *words] for words in [[], *verbs(inner)]]
    return found


def help_text(arguments: list[str]) -> str:
    """As `weft ... --help` prints it in a terminal of 100 columns."""
    runner = typer.testing.CliRunner()
    result = runner.invoke(app, [*arguments, "--help"], prog_name="weft", env={"COLUMNS": "100"})
    if result.exit_code:
        raise SystemExit(result.output)
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


if __name__ == "__main__":
    main()
