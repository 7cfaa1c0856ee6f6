"""A Hugging Face causal LM from a `ModelSpec`, with parameters on the meta device and buffers real.

No memory is spent on weights here: values come later, slice by slice, from `initial` or `pretrained`.
Buffers (rotary tables, masks) are computed by the model's own constructor, so no family needs special care.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.core.errors import ModelError, NotBuiltError, TokenizerError
from weft.core.run_spec import ModelSpec

VOCABULARY_MULTIPLE = 64  # a padded vocabulary divides over tensor-parallel ranks and suits matrix units


def build_config(spec: ModelSpec, *, vocab_size: int, end_of_document: int | None = None) -> Any:
    """The HF config; a random-weight model without a vocab_size of its own takes the tokenizer's, rounded up."""
    if spec.path is not None:
        config = _config_from_folder(spec)
    else:
        overrides = dict(spec.config)
        overrides.setdefault("vocab_size", -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)
        overrides.update(_special_tokens(str(spec.type), overrides, end_of_document))
        config = _config_from_type(str(spec.type), overrides)
    _require_trainable_here(config, vocab_size=vocab_size)
    return config


def build_skeleton(config: Any, *, attention: str = "sdpa") -> nn.Module:
    """The model of `config`: parameters on meta in float32, tied weights tied, buffers real on the CPU."""
    from transformers import AutoModelForCausalLM

    try:
        with parameters_on_meta(), _skip_initialisation():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"a {config.model_type!r} model cannot be built from this config: {first}",
            hint="check [model.config]: sizes must divide (hidden_size by heads, heads by key-value heads)",
        ) from error
    model.tie_weights()
    model.train()
    return model  # type: ignore[no-any-return]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter a module registers is moved to the meta device; buffers stay real.

    `torch.device("meta")` alone would leave buffers and plain tensor attributes without values.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with _HugeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


class _HugeOnMeta(TorchFunctionMode):
    """Tensors beyond a gigabyte are created on meta at once: one fused expert tensor can exceed a host's memory."""

    HUGE_ELEMENTS = 2**28
    FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FACTORIES and kwargs.get("device") is None:
            size = args[0] if len(args) == 1 and isinstance(args[0], tuple | list | torch.Size) else args
            if all(isinstance(length, int) for length in size) and math.prod(size) > self.HUGE_ELEMENTS:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextmanager
def _skip_initialisation() -> Iterator[None]:
    """torch's own initialisers do nothing inside: values drawn for a tensor about to leave for meta are wasted."""
    # transformers keeps its own references to these functions, taken when it is first imported: never from in here
    import transformers.modeling_utils  # noqa: F401

    names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    saved = {name: getattr(nn.init, name) for name in names}

    def leave_as_is(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in names:
                setattr(nn.init, name, leave_as_is)
            yield
        finally:
            for name, function in saved.items():
                setattr(nn.init, name, function)


def _special_tokens(model_type: str, overrides: dict[str, Any], end_of_document: int | None) -> dict[str, Any]:
    """A family's default begin, end and padding ids may lie outside a small vocabulary; those are replaced."""
    config = _config_from_type(model_type, {})
    replaced: dict[str, Any] = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default = getattr(config, key, None)
        if key not in overrides and isinstance(default, int) and default >= overrides["vocab_size"]:
            replaced[key] = end_of_document if key == "eos_token_id" else None
    return replaced


def _config_from_type(model_type: str, overrides: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), n=3)
        raise ModelError(
            f"{model_type!r} is not a causal LM type of the installed transformers",
            hint=f"did you mean {', '.join(near)}?" if near else "for example llama, qwen3, gpt2, mixtral",
        )
    cls = CONFIG_MAPPING[model_type]
    return _with_overrides(cls, overrides, lambda: cls(**overrides))


def _config_from_folder(spec: ModelSpec) -> Any:
    from transformers import AutoConfig

    folder = Path(str(spec.path))
    looks_local = folder.exists() or str(spec.path).startswith((".", "/", "~"))
    if looks_local and not (folder.expanduser() / "config.json").is_file():
        raise ModelError(
            f"there is no config.json in {spec.path}", hint="model.path is a folder saved by save_pretrained"
        )
    try:
        config = AutoConfig.from_pretrained(str(folder.expanduser() if looks_local else spec.path))
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"the config of {spec.path} cannot be read: {first}", hint="give a folder with config.json"
        ) from None

    def build() -> Any:
        for key, value in spec.config.items():
            setattr(config, key, value)
        return config

    return _with_overrides(type(config), spec.config, build, known=set(config.to_dict()))


def _with_overrides(cls: type, overrides: dict[str, Any], build: Any, known: set[str] | None = None) -> Any:
    """`build()`, after refusing overrides the config class does not have: HF would keep and ignore a misspelt one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = known or set(cls().to_dict()) | set(getattr(cls, "attribute_map", {}))
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
            raise ModelError(
                f"{cls.__name__} has no {key!r}",
                hint=f"did you mean {near[0]!r}?" if near else "see the HF config's fields",
            )
    try:
        return build()
    except Exception as error:  # config classes validate with exceptions of their own libraries
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{cls.__name__} refuses these values: {first}", hint="check [model.config]") from None


def _require_trainable_here(config: Any, *, vocab_size: int) -> None:
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        raise NotBuiltError(
            "the router's auxiliary loss (output_router_logits = true) is not part of weft's loss",
            hint="set output_router_logits = false in [model.config]",
        )
    model_vocabulary = getattr(text, "vocab_size", None)
    if model_vocabulary is not None and vocab_size > model_vocabulary:
        raise TokenizerError(
            f"the tokenizer has {vocab_size} tokens but the model's vocabulary holds {model_vocabulary}",
            hint="use the model's own tokenizer, or raise vocab_size in [model.config]",
        )
