"""Bugs in what a plan and its one-process reference share: both sides are wrong alike, so comparing them shows nothing.

Each is a context manager around a whole verification, its references included. `everywhere` puts a bug under every name
that a function was imported by.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import weft.data.corpus
import weft.data.loader
import weft.data.mixture
import weft.data.split
import weft.data.tokenizers
import weft.engine.export
import weft.engine.objective
import weft.engine.optim.clip
import weft.engine.optim.optimizers
import weft.models.build
import weft.models.hf_export
import weft.models.initial
import weft.train.build
import weft.train.loop
import weft.train.rate
import weft.verify.reference
from weft.data.loader import Loader
from weft.data.rows import IGNORED
from weft.verify.plain_objectives import PlainLoss

Bug = AbstractContextManager[None]


@contextmanager
def everywhere(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` replaced by make(original), in every module of weft that holds it."""
    original = getattr(owner, name)
    changed = make(original)
    with ExitStack() as stack:
        stack.enter_context(patch.object(owner, name, changed))
        for module in [module for key, module in sys.modules.items() if key.startswith("weft.")]:
            for alias, value in list(vars(module).items()):
                if value is original:
                    stack.enter_context(patch.object(module, alias, changed))
        yield


@contextmanager
def both(*bugs: Bug) -> Iterator[None]:
    with ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug)
        yield


# --- data -------------------------------------------------------------------------------------------------------------


def _changed_batch(change: Callable[[Any], None]) -> Bug:
    def make(original: Any) -> Any:
        def batch(self: Loader, position: int) -> Any:
            made = original(self, position)
            change(made)
            return made

        return batch

    return everywhere(Loader, "batch", make)


def label_wraps_around() -> Bug:
    def wrap(batch: Any) -> None:
        counted = batch["labels"][:, -1] != IGNORED
        batch["labels"][counted, -1] = batch["input_ids"][counted, 0]

    return _changed_batch(wrap)


def first_label_carries_no_loss() -> Bug:
    return _changed_batch(lambda batch: batch["labels"][:, 0].fill_(IGNORED))


def positions_run_through_documents() -> Bug:
    def run_on(batch: Any) -> None:
        batch["position_ids"].copy_(torch.arange(batch["position_ids"].shape[1]))

    return _changed_batch(run_on)


def order_repeats_rows() -> Bug:
    return everywhere(weft.data.loader, "permute", lambda f: lambda indices, **k: f(indices // 2 * 2, **k))


def mixture_ignores_its_weights() -> Bug:
    even = property(lambda self: [1 / len(self.tables)] * len(self.tables))
    return patch.object(weft.data.mixture.MixedRows, "shares", even)


def mixture_draws_one_source_after_the_other() -> Bug:
    def draws(self: Any, samples: Any) -> Any:
        owners = samples // 16 % len(self.places)
        return owners, samples // (16 * len(self.places)) * 16 + samples % 16

    return patch.object(weft.data.mixture.MixtureOrder, "draws", draws)


def mixture_repeats_rows() -> Bug:
    return everywhere(weft.data.mixture, "permute", lambda f: lambda indices, **k: f(indices // 2 * 2, **k))


def averages_are_not_evaluated() -> Bug:
    return patch.object(weft.train.loop, "is_averaged", lambda kind: False)


def averages_are_not_exported() -> Bug:
    return everywhere(weft.engine.export, "model_tensors", lambda f: lambda *a, averaged_by=0.0, **k: f(*a, **k))


def order_has_half_of_the_rows() -> Bug:
    return everywhere(
        weft.data.loader, "permute", lambda f: lambda indices, size, **k: f(indices, size=size, **k) % max(1, size // 2)
    )


def every_epoch_in_one_order() -> Bug:
    return everywhere(
        weft.data.loader, "permute", lambda f: lambda indices, size, seed, epoch: f(indices, size=size, seed=seed)
    )


def rows_overlap() -> Bug:
    def make(original: Any) -> Any:
        return lambda self, starts, length: original(self, starts // (length - 1) * (length - 2), length=length)

    return everywhere(weft.data.split.Split, "read", make)


def tokenizer_drops_a_byte() -> Bug:
    tokenizer = type(weft.data.tokenizers.open_tokenizer("bytes"))
    return everywhere(tokenizer, "encode", lambda f: lambda self, document: f(self, document)[:-1])


def documents_run_together() -> Bug:
    tokenizer = type(weft.data.tokenizers.open_tokenizer("bytes"))

    def make(original: Any) -> Any:
        return lambda self, documents: [np.concatenate(original(self, documents))]

    return everywhere(tokenizer, "encode_batch", make)


def held_out_documents_are_trained_on() -> Bug:
    def make(original: Any) -> Any:
        def split(*args: Any, eval_fraction: float, **kwargs: Any) -> Any:
            everything, _ = original(*args, eval_fraction=0.0, **kwargs)
            return everything, original(*args, eval_fraction=eval_fraction, **kwargs)[1]

        return split

    return everywhere(weft.data.corpus, "split_documents", make)


def loop_evaluates_on_training_rows() -> Bug:
    def make(original: Any) -> Any:
        def loaders(*args: Any, **kwargs: Any) -> Any:
            training, evaluation = original(*args, **kwargs)
            return training, {name: dataclasses.replace(one, loader=training) for name, one in evaluation.items()}

        return loaders

    return everywhere(weft.train.build, "_loaders", make)


# --- schedule ---------------------------------------------------------------------------------------------------------


def _changed_rate(change: Callable[[Any, int], float]) -> Bug:
    return everywhere(weft.train.rate, "learning_rate_at", lambda _: change)


def _cosine(peak: float, final: float, x: float) -> float:
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * x)))


def cosine_never_decays() -> Bug:
    return _changed_rate(lambda train, step: train.learning_rate * min(1.0, step / max(1, train.warmup_steps)))


def warmup_is_a_step_late() -> Bug:
    def make(original: Any) -> Any:
        return lambda train, step: original(train, step - 1) if step > 1 else 0.0

    return everywhere(weft.train.rate, "learning_rate_at", make)


def cosine_ends_half_way() -> Bug:
    """Progress over the warm-up too: only the last steps of a run differ by much."""

    def rate(train: Any, step: int) -> float:
        if step <= train.warmup_steps:
            return float(train.learning_rate * step / train.warmup_steps)
        return _cosine(train.learning_rate, train.final_learning_rate_ratio, step / train.steps)

    return _changed_rate(rate)


def final_rate_is_zero() -> Bug:
    def rate(train: Any, step: int) -> float:
        if step <= train.warmup_steps:
            return float(train.learning_rate * step / train.warmup_steps)
        return _cosine(train.learning_rate, 0.0, (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps))

    return _changed_rate(rate)


# --- model, initial weights, loss -------------------------------------------------------------------------------------


def _changed_values(change: Callable[[nn.Module], None]) -> Bug:
    def make(original: Any) -> Any:
        def initialise(module: nn.Module, owner: Any) -> None:
            original(module, owner)
            change(module)

        return initialise

    return everywhere(weft.models.initial, "_initialise_module", make)


def initial_linears_doubled() -> Bug:
    return _changed_values(lambda module: _scale(module, 2.0) if isinstance(module, nn.Linear) else None)


def initial_embedding_a_fifth_too_small() -> Bug:
    return _changed_values(lambda module: _scale(module, 0.8) if isinstance(module, nn.Embedding) else None)


def norms_start_below_one() -> Bug:
    return _changed_values(lambda module: _scale(module, 0.98) if "Norm" in type(module).__name__ else None)


def _scale(module: Any, factor: float) -> None:
    module.weight.mul_(factor)


def _changed_skeleton(change: Callable[[Any], Any]) -> Bug:
    def make(original: Any) -> Any:
        return lambda *args, **kwargs: change(original(*args, **kwargs))

    return everywhere(weft.models.build, "build_skeleton", make)


def _with_inputs(extra: Callable[[torch.Tensor], dict[str, Any]]) -> Bug:
    def change(model: Any) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, **extra(kwargs["input_ids"])}

        model.register_forward_pre_hook(hook, with_kwargs=True)
        return model

    return _changed_skeleton(change)


def attention_sees_the_future() -> Bug:
    def mask(ids: torch.Tensor) -> dict[str, Any]:
        rows, length = ids.shape
        return {"attention_mask": torch.zeros(rows, 1, length, length, dtype=torch.get_default_dtype())}

    return _with_inputs(mask)


def positions_off_by_one() -> Bug:
    return _with_inputs(lambda ids: {"position_ids": torch.arange(1, ids.shape[1] + 1).expand_as(ids)})


def tied_weights_untied() -> Bug:
    def make(original: Any) -> Any:
        def build(config: Any, **kwargs: Any) -> Any:
            config = copy.deepcopy(config)
            config.tie_word_embeddings = False
            return original(config, **kwargs)

        return build

    return everywhere(weft.models.build, "build_skeleton", make)


def config_with_another_epsilon() -> Bug:
    def make(original: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            config = original(*args, **kwargs)
            config.rms_norm_eps = 1e-3
            return config

        return build

    return everywhere(weft.models.build, "build_config", make)


def labels_are_smoothed() -> Bug:
    def engine(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            logits.float().flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum", label_smoothing=0.05
        )

    def reference(_self: Any, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = model(**inputs, use_cache=False).logits
        return F.cross_entropy(
            logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=-100, reduction="sum", label_smoothing=0.05
        )

    return both(
        everywhere(weft.engine.objective, "token_loss_sum", lambda _: engine),
        everywhere(PlainLoss, "loss_sum", lambda _: reference),
    )


# --- updates ----------------------------------------------------------------------------------------------------------


def _written_adamw(self: Any, *, is_corrected: bool = True, is_inside: bool = False) -> None:
    """AdamW as torch has it, but for the bug."""
    for group in self.param_groups:
        first, second = group["betas"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            step = state["step"].item() if is_corrected else 1e9
            state["exp_avg"].lerp_(parameter.grad, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
            square = state["exp_avg_sq"] / (1 - second**step)
            root = (square + group["eps"]).sqrt() if is_inside else square.sqrt() + group["eps"]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(group["lr"] * state["exp_avg"] / (1 - first**step) / root)


def _changed_adamw(**how: bool) -> Bug:
    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> None:
        _written_adamw(self, **how)

    return patch.object(torch.optim.AdamW, "step", step)  # type: ignore[return-value]


def bias_correction_missing() -> Bug:
    return _changed_adamw(is_corrected=False)


def epsilon_inside_the_root() -> Bug:
    return _changed_adamw(is_inside=True)


def _changed_constants(change: Callable[[dict[str, Any]], None]) -> Bug:
    """Of every optimizer that is built, whoever builds it."""

    def make(original: Any) -> Any:
        def init(self: Any, params: Any, defaults: dict[str, Any]) -> None:
            original(self, params, defaults)
            for group in self.param_groups:
                change(group)

        return init

    return patch.object(torch.optim.Optimizer, "__init__", make(torch.optim.Optimizer.__init__))  # type: ignore[return-value]


def epsilon_of_another_optimizer() -> Bug:
    return _changed_constants(lambda group: group.update(eps=1e-6))


def betas_swapped() -> Bug:
    return _changed_constants(lambda group: group.update(betas=(group["betas"][1], group["betas"][0])))


def vectors_decay_and_matrices_do_not() -> Bug:
    return _changed_constants(lambda group: group.update(weight_decay=0.0 if group["weight_decay"] else 0.1))


def decay_has_the_wrong_sign() -> Bug:
    return _changed_constants(lambda group: group.update(weight_decay=-group["weight_decay"]))


def momentum_looks_ahead() -> Bug:
    return _changed_constants(lambda group: group.update(nesterov=True))


def clipped_to_twice_the_norm() -> Bug:
    return both(
        everywhere(weft.engine.optim.clip, "clip_factor", lambda f: lambda norm, most: f(norm, 2 * most)),
        everywhere(weft.verify.reference, "clip_gradients", lambda f: lambda masters, most: f(masters, 2 * most)),
    )


# --- export -----------------------------------------------------------------------------------------------------------


def _changed_export(change: Callable[[Any, Any], None]) -> Bug:
    def make(original: Any) -> Any:
        def write(config: Any, model: Any, folder: Any, **kwargs: Any) -> None:
            config = copy.deepcopy(config)
            change(config, model)
            original(config, model, folder, **kwargs)

        return write

    return everywhere(weft.models.hf_export, "_write_config", make)


def export_with_another_epsilon() -> Bug:
    return _changed_export(lambda config, _: setattr(config, "rms_norm_eps", 1e-3))


def export_turns_positions_faster() -> Bug:
    def change(config: Any, _: Any) -> None:
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}

    return _changed_export(change)


def export_generates_past_the_end() -> Bug:
    return _changed_export(lambda _, model: setattr(model.generation_config, "eos_token_id", 7))
