"""`weft new`: commented run.toml and plan.toml to begin with."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import write_text


class NewFile(StrEnum):
    RUN = "run"
    PLAN = "plan"
    SERVER = "server"


def new(
    kind: Annotated[NewFile | None, typer.Argument(help="run | plan | server; without it, a run and a plan.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file; default run.toml, plan.toml or server.toml.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths as JSON on stdout.")] = False,
) -> None:
    """Write a run.toml and a plan.toml with every key, its default and its meaning."""
    from weft.core.errors import BadValueError, InputError

    if kind is None and out is not None:
        raise BadValueError("--out is for one file", hint="weft new run --out my-run.toml")
    kinds = [kind] if kind is not None else [NewFile.RUN, NewFile.PLAN]
    paths = {one: out or Path(f"{one}.toml") for one in kinds}
    for path in paths.values():
        if path.exists():
            raise InputError(f"{path} exists already", hint="choose another --out, or remove it")
    for one, path in paths.items():
        write_text(path, commented_file(one))
    if as_json:
        print(json.dumps({str(one): str(path) for one, path in paths.items()}))


def commented_file(kind: NewFile) -> str:
    """The text of a new file."""
    from weft.core.commented import commented

    if kind is NewFile.PLAN:
        from weft.core.plan import Plan

        opening = (
            "How a model is laid out. One device; `weft plan MODEL --devices 8xH100-80GB --out plan.toml` finds more."
        )
        return commented(Plan.from_tables({}), opening=opening)
    if kind is NewFile.SERVER:
        from weft.core.server_spec import ServerRun

        opening = "A run on parameter servers: weft server train server.toml. Left-out keys have these values."
        return commented(ServerRun.from_tables({}), opening=opening)
    from weft.core.run_spec import RunSpec

    opening = (
        "What is trained: weft train run.toml. Left-out keys have these values, but for the model's and the data's."
    )
    return commented(RunSpec.default(), opening=opening)
