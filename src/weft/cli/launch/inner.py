"""The verb inside a launch, `train run.toml --plan plan.toml`, parsed by its own options before anything starts.

A misspelt option is refused here, not by a job that has waited in a queue for a night.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import BadValueError

VERBS = (("train",), ("verify",), ("server", "train"))
# What the place decides, or what the launch itself answers.
_DECIDED = {"nproc", "out", "continues", "max_restarts", "as_json"}


@dataclass(frozen=True, kw_only=True)
class InnerVerb:
    verb: tuple[str, ...]
    values: dict[str, Any]  # parameter -> value, given or default
    arguments: tuple[str, ...]  # without what the place decides

    def path(self, name: str) -> Path | None:
        value = self.values.get(name)
        return Path(value) if value is not None else None

    @property
    def settings(self) -> list[str]:
        return list(self.values.get("settings") or ())

    @property
    def documents(self) -> dict[str, Path]:
        """Files that the arguments name."""
        found = (self.path(name) for name in ("run", "plan"))
        return {str(path): path for path in found if path is not None}


def parse_inner(root: Any, words: Sequence[str]) -> InnerVerb:
    """The verb of the command `root` and its arguments; raises the parser's error for what the verb does not take."""
    verb = next((verb for verb in VERBS if tuple(words[: len(verb)]) == verb), None)
    if verb is None:
        given = repr(words[0]) if words else "nothing"
        names = ", ".join(" ".join(verb) for verb in VERBS)
        raise BadValueError(
            f"{given} cannot be launched", hint=f"weft launch --on slurm -- train run.toml; verbs: {names}"
        )
    command = root
    for name in verb:
        command = command.commands[name]
    context = command.make_context(f"weft {' '.join(verb)}", list(words[len(verb) :]))
    _refuse_resume(context.params)
    arguments: list[str] = []
    for parameter in command.params:
        given = context.get_parameter_source(parameter.name)
        if parameter.name not in _DECIDED and given is not None and given.name == "COMMANDLINE":
            arguments += _rendered(parameter, context.params[parameter.name])
    return InnerVerb(verb=verb, values=dict(context.params), arguments=tuple(arguments))


def _rendered(parameter: Any, value: Any) -> list[str]:
    if value is None:
        return []
    if parameter.param_type_name == "argument":
        return [str(value)]
    if getattr(parameter, "is_flag", False):
        return [parameter.opts[-1]] if value else []
    values = value if isinstance(value, list | tuple) else [value]
    return [word for one in values for word in (parameter.opts[-1], str(getattr(one, "value", one)))]


def _refuse_resume(values: dict[str, Any]) -> None:
    folder = values.get("resume")
    if folder is not None:
        raise BadValueError(
            "a launched job takes no --resume: it continues the run that it finds in --out",
            hint=f"train {folder}/run.toml --plan {folder}/plan.toml --out {folder}",
        )
