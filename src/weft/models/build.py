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
from weft.core.vocabulary import padded

# what constructors of Hugging Face models raise over sizes that do not fit together
_CANNOT_BUILD = (
    ImportError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AssertionError,
)  # fmt: skip
# registered as causal LMs by transformers, and not causal as they stand: benchmarks/families_train.py checks them all
_NOT_CAUSAL = {
    "cpmant": "the prompt is read in both directions",
    "xlm": "it is a masked LM unless causal = true is set in [model.config]",
    "xlnet": "it is causal only under a permutation mask, which weft does not make",
}


def build_config(spec: ModelSpec, *, vocab_size: int, end_of_document: int | None = None) -> Any:
    """The HF config; a random-weight model without a vocab_size of its own takes the tokenizer's, rounded up."""
    if spec.path is not None:
        config = _config_from_folder(spec)
    else:
        overrides = _with_vocabulary(
            str(spec.type), dict(spec.config), vocab_size=padded(vocab_size), end=end_of_document
        )
        config = _config_from_type(str(spec.type), overrides)
    _require_trainable_here(config, vocab_size=vocab_size)
    return config


def build_skeleton(config: Any, *, attention: str = "sdpa") -> nn.Module:
    """The model of `config`: parameters on meta in float32, tied weights tied, buffers real on the CPU.

    A family without torch's fused attention computes its own ("eager"), whatever was asked.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    has_fused = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
    # transformers 5.17 hands soft-capping to the fused kernel, which leaves it out without a word
    if not has_fused or getattr(config, "attn_logit_softcapping", None):
        attention = "eager"
    try:
        # what a constructor draws at random (a buffer of projections) must be the same on every rank
        with torch.random.fork_rng(devices=[]), parameters_on_meta(), _skip_initialisation():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except _CANNOT_BUILD as error:
        raise ModelError(
            f"a {config.model_type!r} model cannot be built from this config: {_sentence(error)}",
            hint="check [model.config]: sizes must divide (hidden_size by heads, heads by key-value heads)",
        ) from error
    _require_causal(model)
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
            real, param = param, nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            _remember_constructed(param, real.detach())
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with _HugeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def constructed_value(parameter: nn.Parameter) -> torch.Tensor | None:
    """The value the constructor itself gave a small parameter (a gate at zero, a slope at 0.8), if it gave one."""
    value: torch.Tensor | None = getattr(parameter, "_weft_constructed", None)
    return value


def _remember_constructed(parameter: nn.Parameter, value: torch.Tensor) -> None:
    # matrices only when constant: one drawn at random here would not depend on the run's seed
    is_small = value.is_floating_point() and 0 < value.numel() <= _HugeOnMeta.SMALL_ELEMENTS
    if is_small and not value.isnan().any() and (value.ndim < 2 or bool(value.min() == value.max())):
        parameter._weft_constructed = value.clone()  # type: ignore[attr-defined]


class _HugeOnMeta(TorchFunctionMode):
    """Tensors beyond a gigabyte are created on meta at once: one fused expert tensor can exceed a host's memory.

    Small ones without values are filled with NaN, so that they are not taken for values the constructor chose.
    """

    HUGE_ELEMENTS = 2**28
    SMALL_ELEMENTS = 2**16
    FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FACTORIES and kwargs.get("device") is None:
            size = args[0] if len(args) == 1 and isinstance(args[0], tuple | list | torch.Size) else args
            if all(isinstance(length, int) for length in size) and math.prod(size) > self.HUGE_ELEMENTS:
                kwargs = {**kwargs, "device": "meta"}
        made = func(*args, **kwargs)
        if func is torch.empty and made.is_floating_point() and made.numel() <= self.SMALL_ELEMENTS:
            made.fill_(float("nan"))
        return made


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


def _with_vocabulary(model_type: str, overrides: dict[str, Any], *, vocab_size: int, end: int | None) -> dict[str, Any]:
    """`overrides` with a vocabulary and special tokens inside it, in the text part where the config has several."""
    config = _config_from_type(model_type, {})
    text = _text_config(config)
    nested = next((key for key, value in vars(config).items() if value is text and text is not config), None)
    if nested is None or "vocab_size" in config.to_dict():
        overrides.setdefault("vocab_size", vocab_size)
        return {**overrides, **_special_tokens(config, overrides, end)}
    inside = {"model_type": text.model_type, "vocab_size": vocab_size, **overrides.get(nested, {})}
    return {**overrides, nested: {**inside, **_special_tokens(text, inside, end)}}


def _special_tokens(config: Any, overrides: dict[str, Any], end_of_document: int | None) -> dict[str, Any]:
    """A family's default begin, end and padding ids may lie outside a small vocabulary; those are replaced."""
    replaced: dict[str, Any] = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default, last = getattr(config, key, None), overrides["vocab_size"] - 1
        if key not in overrides and isinstance(default, int) and default > last:
            replaced[key] = end_of_document if key == "eos_token_id" else None
            if replaced[key] is None and not _accepts(type(config), key, None):
                replaced[key] = last  # rarely a real token: the vocabulary was rounded up
    return replaced


def _accepts(cls: type, key: str, value: Any) -> bool:
    try:
        cls(**{key: value})
    except Exception:  # config classes validate with exceptions of their own libraries
        return False
    return True


def _sentence(error: Exception) -> str:
    """What an exception of another library says, on one line: the reason is often on its second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


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
        raise ModelError(
            f"the config of {spec.path} cannot be read: {_sentence(error)}", hint="give a folder with config.json"
        ) from None

    def build() -> Any:
        for key, value in spec.config.items():
            setattr(config, key, value)
        return config

    return _with_overrides(type(config), spec.config, build, known=set(config.to_dict()))


def _with_overrides(cls: type, overrides: dict[str, Any], build: Any, known: set[str] | None = None) -> Any:
    """`build()`, after refusing overrides the config class does not have: HF would keep and ignore a misspelt one."""
    if known is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = set(_defaults(cls)) | set(getattr(cls, "attribute_map", {}))
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
        raise ModelError(
            f"{cls.__name__} refuses these values: {_sentence(error)}", hint="check [model.config]"
        ) from None


def _defaults(cls: Any) -> dict[str, Any]:
    try:
        return dict(cls().to_dict())
    except Exception as error:  # as above
        raise ModelError(
            f"{cls.__name__} has no default to start from: {_sentence(error)}", hint="give model.path, a folder"
        ) from None


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:
        raise ModelError(
            f"a {config.model_type!r} model has several text parts, so it is no plain causal LM",
            hint="train one of its parts, or pass the module to weft.Engine with an objective of its own",
        ) from None


def _require_causal(model: Any) -> None:
    """Families that are encoders by default would train to a loss near zero by reading the answer."""
    # some decoders' configs carry the flag too and never read it; a family that reads it keeps it in its layers
    if not getattr(model.config, "is_decoder", True) and any(
        getattr(module, "is_decoder", None) is False for module in model.modules()
    ):
        raise ModelError(
            f"{type(model).__name__} with this config is an encoder: it sees the tokens it is to predict",
            hint="set is_decoder = true in [model.config]",
        )
    if model.config.model_type in _NOT_CAUSAL and not getattr(model.config, "causal", False):
        raise ModelError(
            f"{type(model).__name__} sees the tokens it is to predict: {_NOT_CAUSAL[model.config.model_type]}",
            hint="choose a causal family, for example llama, qwen3, gpt2, mixtral",
        )


def _require_trainable_here(config: Any, *, vocab_size: int) -> None:
    text = _text_config(config)
    if getattr(text, "output_router_logits", False):
        raise NotBuiltError(
            "the router's auxiliary loss (output_router_logits = true) is not part of weft's loss",
            hint="set output_router_logits = false in [model.config]",
        )
    model_vocabulary = getattr(text, "vocab_size", None)
    if model_vocabulary is not None and vocab_size > model_vocabulary:
        raise TokenizerError(
            f"the tokenizer has {vocab_size} tokens but the model's vocabulary holds {model_vocabulary}",
            hint="use the model's own tokenizer (leave data.tokenizer out), or raise vocab_size in [model.config]",
        )
