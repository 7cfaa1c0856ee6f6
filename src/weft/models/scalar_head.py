"""A causal LM whose output head is one row: a number per position, as a reward model needs.

Training keeps the causal LM and its module names. An exported folder is a sequence classifier of one label, whose head
is `score`: transformers' `AutoModelForSequenceClassification` and TRL load it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from weft.core.errors import ModelError
from weft.core.model_shape import SCALAR_HEAD

SCORE = "score.weight"


def mark_scalar(config: Any) -> None:
    """Models of this config get a scalar head, which nothing is tied to."""
    setattr(config, SCALAR_HEAD, True)
    for one in (config, config.get_text_config()):
        one.tie_word_embeddings = False


def has_scalar_head(config: Any) -> bool:
    return bool(getattr(config, SCALAR_HEAD, False))


def replace_head(model: Any) -> None:
    """Replace the output head of a model on the meta device."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear output head that a scalar one could replace",
            hint="choose a causal family, for example llama, qwen3, gpt2, mixtral",
        )
    model.set_output_embeddings(nn.Linear(head.in_features, 1, bias=False, device="meta"))


def head_name(model: Any) -> str:
    """The parameter name of the scalar head."""
    head = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def classifier_config(config: Any) -> Any:
    """The config of the sequence classifier that an export writes."""
    made = copy.deepcopy(config)
    delattr(made, SCALAR_HEAD)
    made.num_labels = 1
    return made


def classifier_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the classifier's names: the head is the one that it does not have."""
    for name, tensor in tensors:
        yield name if name in names else SCORE, tensor
