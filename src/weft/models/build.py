"""A Hugging Face causal LM from a `ModelSpec`, with parameters on the meta device and buffers real.

No memory is spent on weights here: values come later, slice by slice, from `initial` or `pretrained`.
Buffers (rotary tables, masks) are computed by the model's own constructor, so no family needs special care.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.core.errors import ModelError, NotBuiltError, TokenizerError
from weft.core.run_spec import ModelSpec
from weft.core.vocabulary import padded
from weft.models.hf_config import config_from_folder, config_from_type, sentence, text_config, with_vocabulary
from weft.models.scalar_head import has_scalar_head, mark_scalar, replace_head
from weft.models.seeds import seed_generators
from weft.zoo.hub import model_folder

# exceptions of Hugging Face constructors on inconsistent sizes
_CANNOT_BUILD = (
    ImportError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, AssertionError,
)  # fmt: skip
# transformers registers these as causal LMs; by default they are not causal (checked by benchmarks/families_train.py)
_NOT_CAUSAL = {
    "cpmant": "the prompt is read in both directions",
    "xlm": "it is a masked LM unless causal = true is set in [model.config]",
    "xlnet": "it is causal only under a permutation mask, which weft does not build",
}


def build_config(spec: ModelSpec, *, vocab_size: int, end_of_document: int | None = None) -> Any:
    """The HF config. A model with random weights and no vocab_size takes the tokenizer's, rounded up."""
    if spec.path is not None:
        folder = model_folder(spec.path, revision=spec.revision)
        config = config_from_folder(folder, spec.config, name=spec.path)
    else:
        overrides = with_vocabulary(
            str(spec.type), dict(spec.config), vocab_size=padded(vocab_size), end=end_of_document
        )
        config = config_from_type(str(spec.type), overrides)
    _require_trainable_here(config, vocab_size=vocab_size)
    if spec.head == "scalar":
        mark_scalar(config)
    return config


def build_skeleton(config: Any, *, attention: str = "sdpa") -> nn.Module:
    """As `build_on_meta`, for training: a model that sees the tokens it predicts is refused."""
    model = build_on_meta(config, attention=attention)
    _require_causal(model)
    model.train()
    return model


def build_on_meta(config: Any, *, attention: str = "sdpa") -> nn.Module:
    """Build the model of `config`: parameters on meta in float32, weights tied, buffers real on the CPU.

    A family without SDPA support uses "eager" attention, whatever `attention` is.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    has_fused = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_supports_sdpa", True)
    # transformers 5.17 passes soft-capping to the SDPA kernel, which silently ignores it
    if not has_fused or getattr(config, "attn_logit_softcapping", None):
        attention = "eager"
    try:
        # random values of a constructor (a buffer of projections) must be equal on all ranks
        with torch.random.fork_rng(devices=[]), parameters_on_meta(), _skip_initialisation():
            seed_generators(0)
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
            )
    except _CANNOT_BUILD as error:
        raise ModelError(
            f"a {config.model_type!r} model cannot be built from this config: {sentence(error)}",
            hint="check [model.config]: sizes must divide (hidden_size by heads, heads by key-value heads)",
        ) from error
    if has_scalar_head(config):
        replace_head(model)
    model.tie_weights()
    return model  # type: ignore[no-any-return]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as a module registers it; buffers stay real.

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
    """The value that the constructor set on a small parameter (a gate at zero, a slope at 0.8), or None."""
    value: torch.Tensor | None = getattr(parameter, "_weft_constructed", None)
    return value


def _remember_constructed(parameter: nn.Parameter, value: torch.Tensor) -> None:
    # matrices only when constant: a random one would not depend on the run's seed
    is_small = value.is_floating_point() and 0 < value.numel() <= _HugeOnMeta.SMALL_ELEMENTS
    if is_small and not value.isnan().any() and (value.ndim < 2 or bool(value.min() == value.max())):
        parameter._weft_constructed = value.clone()  # type: ignore[attr-defined]


class _HugeOnMeta(TorchFunctionMode):
    """Creates tensors beyond a gigabyte on meta: one fused expert tensor can exceed host memory.

    Fills small uninitialised tensors with NaN, to distinguish them from values that the constructor set.
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
    """Disable torch.nn.init: values of tensors that move to meta would be wasted."""
    # transformers binds these functions at its first import, which must come before the patch
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


def _require_causal(model: Any) -> None:
    """Refuse models that see the tokens they predict: their loss would fall to near zero."""
    if getattr(text_config(model.config), "is_causal", True) is False:
        raise ModelError(
            f"{type(model).__name__} with is_causal = false sees the tokens it is to predict",
            hint="leave is_causal out of the model's config",
        )
    # some decoders' configs have the flag and never read it; a family that reads it stores it in its layers
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
    text = text_config(config)
    if getattr(text, "output_router_logits", False):
        coefficient = getattr(text, "router_aux_loss_coef", 0.001)
        raise NotBuiltError(
            "the model's own router loss (output_router_logits = true) is not computed in its forward",
            hint=f"set output_router_logits = false in [model.config]; the same loss is balance_loss = {coefficient:g} "
            "and balance_over = 'transformers' in [router] of run.toml",
        )
    model_vocabulary = getattr(text, "vocab_size", None)
    if model_vocabulary is not None and vocab_size > model_vocabulary:
        raise TokenizerError(
            f"the tokenizer has {vocab_size} tokens but the model's vocabulary holds {model_vocabulary}",
            hint="use the model's own tokenizer (leave data.tokenizer out), or raise vocab_size in [model.config]",
        )
