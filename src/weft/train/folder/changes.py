"""Changes of a resume: the run recorded in a checkpoint against the requested run.

    data, model, adapter, seed, batch, optimizer   need --set: an edited run.toml alone is refused
    anything else                                  is shown and recorded

The position in the data is a count of samples. It stays valid for another batch size; another source, tokenizer, row
length, split or seed gives another order, so those restart the data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import InputError, RunChangedError
from weft.core.run_spec import RunSpec

# Sections that configure how a run is observed, not what it trains.
_WATCHING = ("checkpoint", "logging", "ledger", "track")
_WATCHING_KEYS = (
    "data.evaluation",
    "evaluation.every",
    "train.collective_timeout_s",
    "train.hang_timeout_s",
    "train.optimizer_kernel",
)
_GUARDED = (
    "data",
    "model",
    "adapter",
    "objective",
    "train.seed",
    "train.global_batch",
    "train.optimizer",
    "train.frozen",
    "evaluation.batches",
)
_CONTENT = (
    "data.source",
    "data.sources",
    "data.weigh_by",
    "data.streaming",
    "data.shuffle_window",
    "data.tokenizer",
    "data.text_field",
    "data.split",
    "data.eval_fraction",
    "data.format",
    "data.chat_template",
    "data.train_on",
)
_ORDER = (*_CONTENT, "data.sequence_length", "data.packing", "data.truncation", "train.seed")
_HELD_OUT = (*_ORDER[:-1], "data.isolate_documents", "train.global_batch", "evaluation.batches")


@dataclass(frozen=True, kw_only=True)
class RunChange:
    """One key of run.toml with another value; None for a missing value."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"

    def as_dict(self) -> dict[str, Any]:
        return {"key": self.key, "old": self.old, "new": self.new}

    @property
    def is_of_training(self) -> bool:
        return not _is_within(self.key, (*_WATCHING, *_WATCHING_KEYS))

    @property
    def is_guarded(self) -> bool:
        return _is_within(self.key, _GUARDED) and not _is_within(self.key, _WATCHING_KEYS)

    @property
    def restarts_data(self) -> bool:
        return _is_within(self.key, _ORDER)

    @property
    def is_of_held_out(self) -> bool:
        return _is_within(self.key, _HELD_OUT)

    @property
    def is_of_evaluation(self) -> bool:
        """Whether losses of evaluation sets before and after are not comparable."""
        return self.is_of_held_out or _is_within(self.key, ("data.evaluation", "evaluation.weights"))


def changes_between(old: RunSpec, new: RunSpec) -> list[RunChange]:
    """The changed keys, in the order of the documents."""
    before, now = dict(_leaves(_tables(old))), dict(_leaves(_tables(new)))
    keys = [*now, *(key for key in before if key not in now)]
    found = [RunChange(key=key, old=before.get(key), new=now.get(key)) for key in keys]
    return [change for change in found if change.old != change.new]


def change_of_content(old: Any, new: Mapping[str, int], run: RunSpec) -> list[RunChange]:
    """A change of text behind the same source name; `old` is None in older checkpoints."""
    if not isinstance(old, dict) or old == new:
        return []
    return [RunChange(key="data.source", old=_contents(run, old), new=_contents(run, new))]


def require_named(changes: Sequence[RunChange], named: Collection[str], earlier: Collection[RunChange] = ()) -> None:
    """Require that --set names each guarded change, in this resume or an earlier one."""
    known = {(change.key, _shown(change.new)) for change in earlier}
    unnamed = [
        change
        for change in changes
        if change.is_guarded and not _is_named(change.key, named) and (change.key, _shown(change.new)) not in known
    ]
    if unnamed:
        settings = " ".join(f"--set {change.key}=..." for change in unnamed)
        raise RunChangedError(
            f"the requested run differs from the one recorded in the checkpoint: {'; '.join(map(str, unnamed))}",
            hint=f"restore the old value in run.toml, or confirm the change: {settings}",
        )


def require_same_base(meta: Mapping[str, Any], found: str | None, run: RunSpec) -> None:
    """Refuse other weights under a saved adapter: their sum would be a model that nobody trained."""
    saved = meta.get("base")  # None in older checkpoints
    if saved is not None and saved != found:
        raise RunChangedError(
            f"the weights in {run.model.path} are not those under which the adapter of the checkpoint was trained",
            hint="restore the files, or set model.path to a folder with the same weights",
        )


def recorded_run(meta: Mapping[str, Any], *, otherwise: RunSpec) -> RunSpec:
    """The run recorded in a checkpoint; `otherwise` if it is missing or has keys of another version."""
    try:
        return RunSpec.from_tables(meta["run"]) if isinstance(meta.get("run"), dict) else otherwise
    except InputError:
        return otherwise


def keys_of(settings: Sequence[str]) -> tuple[str, ...]:
    """The keys that --set names."""
    return tuple(setting.partition("=")[0].strip() for setting in settings)


def _is_within(key: str, groups: Collection[str]) -> bool:
    return any(key == group or key.startswith(f"{group}.") for group in groups)


def _is_named(key: str, named: Collection[str]) -> bool:
    return _is_within(key, named) or any(name.startswith(f"{key}.") for name in named)


def _tables(run: RunSpec) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude_none=True)


def _leaves(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _contents(run: RunSpec, found: Mapping[str, int]) -> str:
    counts = f"{found.get('documents', 0):,} documents, {found.get('tokens', 0):,} tokens"
    return f"{_shown(run.data.source)} ({counts})"


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)
