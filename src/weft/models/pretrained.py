"""Weights of a Hugging Face folder for a skeleton on the meta device: any slice of any parameter, read on demand.

It fills nothing and holds nothing: the caller reads the slices that its rank owns. All errors (files,
names, shapes, formats) are raised on construction, from the headers, before any data is read.

    name in the model -> tie group -> stored tensor (perhaps renamed), or a conversion of several -> the wanted slice
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from transformers import PreTrainedModel

from weft.core.errors import WeightsError
from weft.core.json_files import read_json_table
from weft.models.conversion import Shape, plan_load
from weft.models.weight_files import Index, WeightFiles, full_index
from weft.zoo.hub import CONFIG_NAME

_PLAIN_DTYPES = {"F64", "F32", "F16", "BF16"}
_SHOWN = 3


class PretrainedWeights:
    """Tensors of `folder` under the names and shapes of `skeleton`; a context manager that closes the files.

    `allow_missing` are names (or patterns with *) that may have no source: they are listed by `missing()`.
    """

    def __init__(self, folder: Path, skeleton: PreTrainedModel, *, allow_missing: Iterable[str] = ()) -> None:
        _refuse_quantised(folder)
        self._skeleton = skeleton
        self._files = WeightFiles(folder)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in saved_tensors(skeleton).items()}
        self._ties = tie_groups(skeleton)
        self._stored_shapes = {name: stored.shape for name, stored in self._files.stored.items()}
        self._plan = plan_load(skeleton, self._stored_shapes)
        self._missing = self._find_missing(tuple(allow_missing))
        self._check_shapes()
        self._check_dtypes()

    def __enter__(self) -> PretrainedWeights:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def names(self) -> list[str]:
        """Every parameter, then every persistent buffer, that can be read; a tied one under its first name."""
        return [name for name in unique_names(self._skeleton) if name not in self._missing]

    def buffer_names(self) -> list[str]:
        """The persistent buffers among `names`: a constructor cannot set a router's trained bias."""
        buffers = {name for name, _ in self._skeleton.named_buffers()}
        return [name for name in self.names() if name in buffers]

    def missing(self) -> list[str]:
        """Names without a source that were allowed to have none; the caller initialises them."""
        return list(self._missing)

    def unexpected(self) -> list[str]:
        """Stored tensors that the model does not use, without those that its family ignores."""
        harmless = _ignorable(self._skeleton)
        spare = self._plan.unexpected.items()
        return [
            key for key, name in spare if not any(re.search(rule, text) for rule in harmless for text in (key, name))
        ]

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Callable[[Index], torch.Tensor]]]:
        """For each wanted name a function from a global index to that slice, in the order of the files."""
        for name in sorted(names, key=self._file_order):
            yield name, lambda index, name=name: self.read(name, index)  # type: ignore[misc]

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        """The global slice `index` of a tensor (all of it by default), in the dtype it is stored in."""
        wanted = full_index(self._shapes[name], index)
        first, *others = self._sources(name)
        value = self._read_one(first, wanted)
        for other in others:
            if not torch.equal(value, self._read_one(other, wanted)):
                raise WeightsError(
                    f"the model ties {first!r} and {other!r}, but {self._files.folder} stores different values",
                    hint="set tie_word_embeddings = false in the model's config",
                )
        return value

    def _read_one(self, name: str, wanted: Index) -> torch.Tensor:
        conversion = self._plan.converted.get(name)
        if conversion is None:
            return self._files.read(self._plan.direct[name], wanted)
        if not conversion.stacks_experts or wanted[0].start == wanted[0].stop:
            return _compact(conversion.run(self._skeleton, self._files.read)[name][wanted])
        made = conversion.run(self._skeleton, self._files.read, experts=wanted[0])[name]
        return _compact(made[(slice(None), *wanted[1:])])

    def _sources(self, name: str) -> list[str]:
        """Names of the tie group that have a source, the requested one first."""
        group = sorted(self._ties.get(name, {name}), key=lambda other: (other != name, other))
        return [other for other in group if other in self._plan.direct or other in self._plan.converted]

    def _file_order(self, name: str) -> tuple[str, str]:
        source = self._sources(name)[0]
        conversion = self._plan.converted.get(source)
        key = conversion.parts[0][1] if conversion else self._plan.direct[source]
        return str(self._files.stored[key].file), name

    def _find_missing(self, allowed: tuple[str, ...]) -> list[str]:
        without = [name for name in unique_names(self._skeleton) if not self._sources(name)]
        buffers = {name for name, _ in self._skeleton.named_buffers()}
        declared = getattr(self._skeleton, "_keys_to_ignore_on_load_missing", None) or ()
        for name in without:
            if name in buffers and any(re.search(rule, name) for rule in declared):
                continue  # a constant that the family's checkpoints omit
            if not any(fnmatchcase(name, pattern) for pattern in allowed):
                raise self._no_source(name, num_without=len(without))
        return without

    def _no_source(self, name: str, *, num_without: int) -> WeightsError:
        why = self._plan.failed.get(name)
        reason = f": {why}" if why else f" ({num_without} of {len(self._shapes)} tensors have none)"
        return WeightsError(
            f"{self._files.folder} has no usable source for {name!r}{reason}",
            hint=_spare_hint(self.unexpected()) or "do config and weights belong together? is a shard missing?",
        )

    def _check_shapes(self) -> None:
        for name in [*self._plan.direct, *self._plan.converted]:
            if name in self._shapes:
                self._check_shape(name, self._plan.shape(name, self._stored_shapes))

    def _check_shape(self, name: str, found: Shape) -> None:
        if found != self._shapes[name]:
            raise WeightsError(
                f"{name!r} is {list(found)} in {self._files.folder}, but {list(self._shapes[name])} in the model",
                hint="the model's config (vocab_size, hidden_size, ...) must be the one the weights were saved with",
            )

    def _check_dtypes(self) -> None:
        """Refuse fp8 and packed tensors, which would load without their scales: silently wrong."""
        state = saved_tensors(self._skeleton)
        for name, key in self._stored_parts():
            stored = self._files.stored[key]
            if name in state and state[name].is_floating_point() and stored.dtype not in _PLAIN_DTYPES:
                raise WeightsError(
                    f"{key!r} in {stored.file} is stored as {stored.dtype}, not as plain floating point",
                    hint="quantised weights cannot be trained: use or make an unquantised copy",
                )

    def _stored_parts(self) -> Iterator[tuple[str, str]]:
        yield from self._plan.direct.items()
        for name, conversion in self._plan.converted.items():
            yield from ((name, key) for _, key in conversion.parts)


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under all their names, without the extra state of modules."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def unique_names(model: PreTrainedModel) -> list[str]:
    """The first name of every parameter and then of every persistent buffer."""
    saved = saved_tensors(model)
    parameters = [name for name, _ in model.named_parameters()]
    return parameters + [name for name, _ in model.named_buffers() if name in saved]


def tie_groups(model: PreTrainedModel) -> dict[str, frozenset[str]]:
    """Tied name -> all names of that tensor, by identity and by the model's declaration."""
    groups: dict[int, set[str]] = {}
    owner: dict[str, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
        owner[name] = id(parameter)
    for target, source in declared_ties(model).items():
        if target in owner and source in owner and owner[target] != owner[source]:
            merged = groups.pop(owner[target])
            groups[owner[source]] |= merged
            owner.update(dict.fromkeys(merged, owner[source]))
    return {name: frozenset(names) for names in groups.values() if len(names) > 1 for name in names}


def declared_ties(model: PreTrainedModel) -> dict[str, str]:
    """Tied name -> the name that is stored, as transformers expands it for this model's config."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def stored_ties(model: PreTrainedModel) -> dict[str, str]:
    """Tied name -> the name that is written: as transformers declares, or the first name of the tensor."""
    first = set(unique_names(model))
    declared = declared_ties(model)
    ties: dict[str, str] = {}
    for name, group in tie_groups(model).items():
        kept = next((declared[one] for one in sorted(group) if one in declared), None)
        ties[name] = kept or next(one for one in sorted(group) if one in first)
    return {name: kept for name, kept in ties.items() if name != kept}


def _compact(part: torch.Tensor) -> torch.Tensor:
    """Copy a slice into its own memory: a view would keep the full converted tensor alive."""
    is_full = part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes
    return part if is_full else part.clone(memory_format=torch.contiguous_format)


def _ignorable(model: PreTrainedModel) -> list[str]:
    """Patterns of stored names that transformers silently drops, formerly saved buffers among them."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    for ending in ("rotary_emb.inv_freq", "position_ids"):
        if any(name.endswith(ending) for name in buffers):
            patterns.append(re.escape(ending) + "$")
    return patterns


def _spare_hint(spare: list[str]) -> str:
    shown = ", ".join(spare[:_SHOWN]) + (", ..." if len(spare) > _SHOWN else "")
    return f"stored but not used: {shown}" if spare else ""


def _refuse_quantised(folder: Path) -> None:
    config = folder / CONFIG_NAME
    fields = read_json_table(config, hint="copy the folder again") if config.is_file() else {}
    found = fields.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method is not None:
        raise WeightsError(
            f"the weights in {folder} are quantised ({method})",
            hint="quantised weights cannot be trained: use or make an unquantised copy",
        )
