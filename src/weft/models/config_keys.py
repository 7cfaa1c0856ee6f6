"""`known_keys`: the keys that an HF config may hold: its fields, its aliases, and keys that transformers' code reads.

Published configs carry keys that the class does not declare and the model reads (`getattr(config, "head_dim", None)`).
A key that no code reads is a misspelling, which transformers would silently ignore. The sources are parsed, never run:

    modeling_X.py, and the code it uses from its imports         config.KEY, getattr(config, "KEY"), hasattr
    configuration_X.py, and its parents                          kwargs.pop("KEY"), kwargs["KEY"]

In a package with several configs (text, vision), classes annotated with another config are skipped.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# metadata that transformers writes to config.json
_METADATA = frozenset({"model_type", "torch_dtype", "transformers_version", "architectures"})
_READ_OF_ALL = frozenset({"tie_word_embeddings"})  # read by the parent class of every model
# transformers merges these into rope_parameters, where a config has it
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
_READ_WITH_ROPE = ROPE_KEYS | {"original_max_position_embeddings"}
# modules outside transformers.models that model code passes its config to
_FOLLOWED = ("transformers.models.", "transformers.masking_utils", "transformers.modeling_rope_utils")
_LOOKUPS = {"getattr", "hasattr"}
_MAPPING_READS = {"pop", "get", "setdefault"}


def known_keys(config: Any) -> frozenset[str]:
    """Every key that `config` (an HF config of any class) or its model reads."""
    cls: Any = type(config)
    return _fields(config) | _METADATA | _READ_OF_ALL | (_read_by_code(cls) - _fields_of_parts(config))


def constructor_keys(config_class: type) -> frozenset[str]:
    """Older names that the class's constructor translates; they have a meaning only during construction."""
    found = (_keywords(parent) for parent in config_class.__mro__ if _is_config(parent) and not _is_base(parent))
    return frozenset().union(*found)


def parts_of(config: Any) -> dict[str, Any]:
    """Sub-configs of a config: text, vision, ..."""
    return {key: value for key, value in vars(config).items() if _is_config(type(value))}


def _fields(config: Any) -> frozenset[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rope = _READ_WITH_ROPE if hasattr(config, "rope_parameters") else frozenset[str]()
        return frozenset(config.to_dict()) | frozenset(getattr(config, "attribute_map", {})) | rope


def _fields_of_parts(config: Any) -> frozenset[str]:
    """Fields of the sub-configs; at the top level no code would read them."""
    return frozenset().union(*(_fields(part) for part in parts_of(config).values()))


def _is_config(cls: type) -> bool:
    from transformers import PretrainedConfig

    return isinstance(cls, type) and issubclass(cls, PretrainedConfig)


def _is_base(cls: type) -> bool:
    return not cls.__module__.startswith("transformers.models.")


@cache
def _read_by_code(config_class: type) -> frozenset[str]:
    """Attributes of this config that the code of its models reads."""
    reader = _Reader(config_class)
    for name in _model_modules(config_class):
        reader.read_module(name)
    around = _composites_beside(config_class).values() if getattr(config_class, "base_config_key", "") else ()
    theirs = {key for cls in around if cls is not config_class for key in _declared(cls)}
    return frozenset(key for key in reader.keys - theirs if not _is_internal(config_class, key))


def _declared(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def _is_internal(config_class: type, key: str) -> bool:
    """Whether the key is a method, a private name or a sub-config (those are among the fields)."""
    return key.startswith("_") or key.endswith("config") or callable(getattr(config_class, key, None))


def _model_modules(config_class: type) -> set[str]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    beside = config_class.__module__.replace(".configuration_", ".modeling_")
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    models = model if isinstance(model, tuple) else (model,)
    named = {one.__module__ for one in models if one is not None} | {beside}
    return {name for name in named if name.startswith("transformers.")}


@dataclass(frozen=True)
class _Module:
    """Top level of one source file: definitions, and the origin of imported names."""

    definitions: dict[str, ast.AST]
    imports: dict[str, tuple[str, str]]


@cache
def _parse(name: str) -> _Module | None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    package = name if found.submodule_search_locations else name.rpartition(".")[0]
    definitions: dict[str, ast.AST] = {
        node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    imports: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            imports |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
    return _Module(definitions, imports)


class _Reader:
    """Collects the keys of one config class that a module's definitions, and all they refer to, read."""

    def __init__(self, config_class: type) -> None:
        self.keys: set[str] = set()
        self._part_name = getattr(config_class, "base_config_key", "")
        self._has_parts = bool(getattr(config_class, "sub_configs", None))
        self._own = {cls.__name__ for cls in config_class.__mro__}
        # layers of a text model are sometimes annotated with the parent config
        around = set() if self._has_parts or not self._part_name else set(_composites_beside(config_class))
        self._others = set(_configs_beside(config_class)) - self._own - around
        self._seen: set[tuple[str, str]] = set()

    def read_module(self, name: str) -> None:
        module = _parse(name)
        for definition in module.definitions if module else ():
            self._read(name, definition)

    def _read(self, module_name: str, name: str) -> None:
        if (module_name, name) in self._seen or not _is_followed(module_name):
            return
        self._seen.add((module_name, name))
        module = _parse(module_name)
        if module is None:
            return
        if name in module.imports and name not in module.definitions:
            self._read(*module.imports[name])
        elif name in module.definitions and not self._is_of_another(module.definitions[name]):
            self._collect(module_name, module, module.definitions[name])

    def _collect(self, module_name: str, module: _Module, definition: ast.AST) -> None:
        for holder, key in _attribute_reads(definition):
            if self._is_own(holder):
                self.keys.add(key)
        for node in ast.walk(definition):
            if isinstance(node, ast.Name) and (node.id in module.definitions or node.id in module.imports):
                self._read(module_name, node.id)

    def _is_own(self, holder: str) -> bool:
        """Whether the name refers to this class: `text_config` does for the text config or without sub-configs."""
        return holder == "config" or holder == self._part_name or not (self._part_name or self._has_parts)

    def _is_of_another(self, definition: ast.AST) -> bool:
        names = set(_config_annotations(definition))
        return bool(names & self._others) and not names & self._own


def _is_followed(module: str) -> bool:
    # the auto classes read keys of every config, none specific to this model
    return module.startswith(_FOLLOWED) and not module.startswith("transformers.models.auto")


def _configs_beside(config_class: type) -> dict[str, Any]:
    """Every config of the package, by the name of its class."""
    return {name: value for name, value in vars(inspect.getmodule(config_class)).items() if _is_config(value)}


def _composites_beside(config_class: type) -> dict[str, Any]:
    """Configs of the package that have sub-configs."""
    beside = _configs_beside(config_class)
    return {name: cls for name, cls in beside.items() if getattr(cls, "sub_configs", None)}


def _attribute_reads(definition: ast.AST) -> Iterator[tuple[str, str]]:
    """(name of the config, key) for config.KEY, self.config.KEY, getattr(config, "KEY", ...)."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and _last_name(node.value).endswith("config"):
            yield _last_name(node.value), node.attr
        elif isinstance(node, ast.Call) and _last_name(node.func) in _LOOKUPS and len(node.args) > 1:
            holder, key = _last_name(node.args[0]), node.args[1]
            if holder.endswith("config") and isinstance(key, ast.Constant):
                yield holder, str(key.value)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _config_annotations(definition: ast.AST) -> Iterator[str]:
    """Classes that `config` is annotated with: as an argument of a constructor or function, or as a class attribute."""
    for node in ast.walk(definition):
        named = node.arg if isinstance(node, ast.arg) else _last_name(getattr(node, "target", node))
        if isinstance(node, ast.arg | ast.AnnAssign) and named == "config":
            yield from _names_in(node.annotation)


def _names_in(annotation: ast.AST | None) -> Iterator[str]:
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def _keywords(config_class: type) -> frozenset[str]:
    """Names that a config class pops from its keyword arguments."""
    module = _parse(config_class.__module__)
    definition = module.definitions.get(config_class.__name__) if module else None
    return frozenset(_keyword_reads(definition)) if definition is not None else frozenset()


def _keyword_reads(definition: ast.AST) -> Iterator[str]:
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and _is_keyword_read(node.func) and node.args:
            yield from _constants(node.args[0])
        elif isinstance(node, ast.Subscript) and _last_name(node.value) == "kwargs":
            yield from _constants(node.slice)
        elif isinstance(node, ast.For) and any(_is_keyword_read(inner) for inner in ast.walk(node)):
            yield from _constants(node.iter)


def _is_keyword_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in _MAPPING_READS and _last_name(node.value) == "kwargs"


def _constants(node: ast.AST) -> Iterator[str]:
    for inner in [node, *getattr(node, "elts", [])]:
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value
