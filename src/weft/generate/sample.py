"""Samples text for a batch of prompts and measures it: tokens per second, bytes of weights and of the cache.

transformers' own `generate` samples. Without a low-bit cache it uses, on a GPU, its static cache with a compiled
forward. Prompts of one batch are padded on the left. The first sampled token ends the prefill, the rest is the decode.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from weft.core.errors import InputError
from weft.generate.kv_cache import cache_bytes, layers_in_16_bits, low_bit_cache
from weft.generate.load import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    max_new_tokens: int = 100
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    kv_cache: str = "bf16"


@dataclass(frozen=True)
class Generated:
    """The texts of all prompts, in order, and what they cost."""

    texts: list[str]
    num_tokens: list[int]
    prefill_s: float
    decode_s: float
    decoded_tokens: int
    weight_bytes: int
    cache_bytes: int
    cached_tokens: int  # of each sequence, padding included
    layers_in_16_bits: int
    peak_memory_bytes: int | None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the decode, all prompts together."""
        return self.decoded_tokens / self.decode_s if self.decoded_tokens and self.decode_s > 0 else None


def sample(loaded: LoadedModel, prompts: list[str], sampling: Sampling) -> Generated:
    """Continue every prompt, in one batch."""
    model, tokenizer = loaded.model, loaded.tokenizer
    inputs = _encode(tokenizer, prompts).to(model.device)
    length = inputs["input_ids"].shape[1]
    _require_positions(model, length + sampling.max_new_tokens)
    clock = _Clock()
    cache = low_bit_cache(model.config, sampling.kv_cache) if sampling.kv_cache != "bf16" else None
    on_gpu = model.device.type == "cuda"
    options: dict[str, Any] = {"past_key_values": cache} if cache is not None else {}
    config = _generation_config(model, tokenizer, sampling)
    # a static cache takes its number of heads from the config
    if cache is None and on_gpu and loaded.num_ranks == 1 and model._can_compile_fullgraph:
        config.cache_implementation = "static"
    torch.manual_seed(sampling.seed)
    clock.start()
    with torch.inference_mode():
        made = model.generate(
            **inputs,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([clock]),
            **options,
        )
    clock.stop()
    new = made.sequences[:, length:]
    counts = [_length(row, config.eos_token_id) for row in new.tolist()]
    kept = [row[:count] for row, count in zip(new.tolist(), counts, strict=True)]
    used = made.past_key_values
    return Generated(
        texts=tokenizer.batch_decode(kept, skip_special_tokens=True),
        num_tokens=counts,
        prefill_s=clock.prefill_s,
        decode_s=clock.decode_s,
        decoded_tokens=max(0, new.shape[1] - 1) * len(prompts),
        weight_bytes=sum(one.nbytes for one in (*model.parameters(), *model.buffers())),
        cache_bytes=cache_bytes(used),
        cached_tokens=length + new.shape[1] - 1,
        layers_in_16_bits=layers_in_16_bits(used) if cache is not None else 0,
        peak_memory_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )


def _encode(tokenizer: Any, prompts: list[str]) -> Any:
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:
        raise InputError("a prompt has no tokens", hint="give a prompt of at least one character")
    return inputs


def _require_positions(model: Any, length: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        raise InputError(
            f"the longest prompt and max-new-tokens make {length} tokens, and the model has {limit} positions",
            hint="shorten the prompt or lower --max-new-tokens",
        )


def _generation_config(model: Any, tokenizer: Any, sampling: Sampling) -> GenerationConfig:
    """The request alone: a folder's own temperature and top-p would change what was asked for."""
    own = model.generation_config
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        chosen = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    ends = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        **chosen,
    )


def _length(tokens: list[int], ends: Any) -> int:
    """Tokens up to the first end, without it."""
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    return next((index for index, token in enumerate(tokens) if token in stops), len(tokens))


class _Clock(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Never stops; marks the time of the first token."""

    def __init__(self) -> None:
        self.prefill_s = self.decode_s = 0.0
        self._begin = self._first = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self._first:
            self._first = _now()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def start(self) -> None:
        self._begin = _now()

    def stop(self) -> None:
        self.prefill_s, self.decode_s = self._first - self._begin, _now() - self._first


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
