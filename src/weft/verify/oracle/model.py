"""The plain transformers model of a config: its loss by its own `labels=` or by `objectives`, its gradients, its
logits. Float32, eager.

Rows of S + 1 tokens go in unshifted: transformers itself takes the next token as the label. In addition, the
same loss is computed from the logits of the first S tokens. If a family's own loss is another number (it adds
terms, or cannot take a row of S + 1), the computed one is compared with, and the verdict reports this.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.verify.oracle.facts import Rows, Tensors
from weft.verify.oracle.objectives import REFERENCE, NextTokenFormula, inputs_of, row_log_probs
from weft.verify.oracle.streams import IGNORED, Stream

OWN_TOLERANCE = 1e-5  # relative: the same float32 numbers, averaged in another order


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The model's inputs and labels for some rows."""

    fields: dict[str, NDArray[np.int64]]

    @staticmethod
    def of(rows: NDArray[np.int64], stream: Stream) -> Batch:
        """The batch of rows of S + 1 tokens."""
        return Batch(fields=stream.batch(rows))


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The mean loss of a batch; `own`: the model's own `labels=` loss, or None with the reason."""

    value: float
    own: float | None
    why_not_own: str = ""
    size: float = 0.0  # mean size of the sums that the value is a small difference of


def build_plain(config: Any, *, seed: int, has_scores: bool = False) -> Any:
    """A model initialised by transformers' own rules; `has_scores`: its head is one row without bias."""
    from transformers import AutoModelForCausalLM

    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        if has_scores:
            head = torch.nn.Linear(model.get_output_embeddings().in_features, 1, bias=False)
            model._init_weights(head)
            model.set_output_embeddings(head)
    return model.train()


class PlainModel:
    """One transformers model whose weights are set by name."""

    def __init__(self, config: Any, objective: NextTokenFormula | None = None) -> None:
        self.objective = objective or NextTokenFormula()
        self.model = build_plain(config, seed=1, has_scores=self.objective.has_scores)
        other = dict(build_plain(config, seed=2).named_buffers())
        same = (torch.equal(buffer, other[name]) for name, buffer in self.model.named_buffers())
        self.draws_buffers = not all(same)  # random constants of the forward that no checkpoint saves
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    @torch.no_grad()
    def put(self, weights: Tensors) -> None:
        """Set parameters, and buffers in `weights`; other buffers get transformers' initial values."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(weights.get(name, self._buffers[name]))

    def is_random(self, batch: Batch) -> bool:
        """Whether training is random (dropout), so that two forwards differ."""
        return self._total(batch.fields, seed=1) != self._total(batch.fields, seed=2)

    def loss(self, batch: Batch, *, chunk_rows: int, is_training: bool) -> Loss:
        self.model.train(is_training)
        with torch.no_grad():
            total = size = 0.0
            for chunk in _chunks(batch.fields, chunk_rows):
                logits = self._logits(chunk)
                total += self.objective.total(logits, chunk).item()
                size += self.objective.size(logits, chunk)
            own, why = (None, "") if self.objective.what else self._own(batch)
        self.model.train()
        count = max(1, self.count(batch))
        value = total / count
        if own is not None and not abs(own - value) <= OWN_TOLERANCE * abs(value):
            own, why = None, f"its own loss is {own:.6g} and not {value:.6g}: it has other terms"
        return Loss(value=value, own=own, why_not_own=why, size=size / count)

    def count(self, batch: Batch) -> int:
        """What the loss of a batch is divided by."""
        return self.objective.count(batch.fields["labels"])

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the log-probabilities of its rows by the weights now, if the objective needs them."""
        if not self.objective.needs_reference:
            return batch
        found = row_log_probs(self.logits(batch), batch.fields["labels"])
        return Batch(fields={**batch.fields, REFERENCE: found.numpy()})

    def gradients(self, batch: Batch, *, chunk_rows: int, z_loss: float = 0.0) -> dict[str, torch.Tensor]:
        """Gradients of the mean loss, with the z-loss of routers; of parameters that it depends on."""
        self.model.train()
        self.model.zero_grad()
        num_tokens = batch.fields["labels"].size
        for chunk in _chunks(batch.fields, chunk_rows):
            loss = self._sum(chunk) / max(1, self.count(batch))
            if z_loss:
                loss = loss + z_loss * self._squares(chunk) / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
        named = self.model.named_parameters()
        found = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
        self.model.zero_grad()
        return found

    def untrained(self, batch: Batch, *, chunk_rows: int) -> frozenset[str]:
        """Parameters that the loss does not depend on, or that the model's own code freezes."""
        trained = self.gradients(batch, chunk_rows=chunk_rows)
        return frozenset(name for name, _ in self.model.named_parameters() if name not in trained)

    def frozen(self) -> frozenset[str]:
        """Parameters that the model's own code freezes."""
        return frozenset(name for name, parameter in self.model.named_parameters() if not parameter.requires_grad)

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        self.model.to(dtype)
        self.objective.to(dtype)
        try:
            yield
        finally:
            self.model.to(torch.float32)
            self.objective.to(torch.float32)

    def logits(self, batch: Batch) -> torch.Tensor:
        return logits_of(self.model, batch.fields)

    def _own(self, batch: Batch) -> tuple[float | None, str]:
        """transformers' loss of unshifted rows, with the same labels ignored."""
        following = np.maximum(batch.fields["labels"][:, -1:], 0)  # without a label, any token may follow
        rows = np.concatenate([batch.fields["input_ids"], following], axis=1)
        labels = np.concatenate([np.full_like(following, IGNORED), batch.fields["labels"]], axis=1)
        given = {"input_ids": rows, "labels": labels}
        if "position_ids" in batch.fields:
            before = batch.fields["position_ids"]
            last = np.where(batch.fields["labels"][:, -1] == IGNORED, 0, before[:, -1] + 1)
            given["position_ids"] = np.concatenate([before, last[:, None]], axis=1)
        try:
            with _quiet():
                loss = self.model(
                    **{key: torch.from_numpy(value) for key, value in given.items()}, use_cache=False
                ).loss
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
            return None, f"its own loss takes no row of {rows.shape[1]} tokens ({type(error).__name__})"
        return (None, "it has no loss of its own") if loss is None else (float(loss), "")

    def _sum(self, batch: Rows) -> torch.Tensor:
        """The summed loss of the rows."""
        return self.objective.total(self._logits(batch), batch)

    def _logits(self, batch: Rows) -> torch.Tensor:
        with _quiet():
            logits: torch.Tensor = self.model(**inputs_of(batch), use_cache=False).logits.float()
        return logits

    def _squares(self, batch: Rows) -> torch.Tensor:
        """The sum over tokens and layers of squared log-sum-exps of the router logits that transformers returns."""
        with _quiet():
            layers = self.model(**inputs_of(batch), use_cache=False, output_router_logits=True).router_logits
        return torch.stack([torch.logsumexp(logits.float(), dim=-1).square().sum() for logits in layers]).sum()

    def _total(self, batch: Rows, *, seed: int) -> float:
        self.model.train()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._sum(batch).item()


def logits_of(model: Any, batch: Rows) -> torch.Tensor:
    """The logits in evaluation mode; the mode is restored."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), _quiet():
        logits: torch.Tensor = model(**inputs_of(batch), use_cache=False).logits
    model.train(was_training)
    return logits


def _chunks(batch: Rows, chunk_rows: int) -> Iterator[Mapping[str, NDArray[Any]]]:
    for begin in range(0, len(batch["labels"]), chunk_rows):
        yield {key: value[begin : begin + chunk_rows] for key, value in batch.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
