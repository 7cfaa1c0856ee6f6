"""Texts that the model writes every `samples.every` steps, with the weights and the layout of the training.

Every rank computes the same rows; rank 0 chooses each token, so that ranks never differ. The choice depends on
(train.seed, step) alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import DataError
from weft.core.records import TextSample
from weft.core.run_spec import RunSpec
from weft.core.vocabulary import BYTES
from weft.data.samples import SampleEncoder, without_end
from weft.data.tokenizers import open_tokenizer
from weft.engine.engine import Engine


class TextSampler:
    """The prompts of a run as tokens, continued by `sample`."""

    def __init__(self, run: RunSpec, engine: Engine) -> None:
        self._spec, self._seed, self._engine = run.samples, run.train.seed, engine
        tokenizer = open_tokenizer(run.data.tokenizer or BYTES)
        self._backend: Any = tokenizer.backend
        self._num_tokens = tokenizer.vocab_size  # a model's vocabulary may have rows that no token names
        self._ends = {tokenizer.end_of_document, self._backend.eos_token_id}
        self._prompts = [_encode(prompt, run) for prompt in self._spec.prompts]
        longest = max(map(len, self._prompts)) + self._spec.max_new_tokens
        if longest > run.data.sequence_length:
            raise DataError(
                f"the longest of samples.prompts and samples.max_new_tokens make {longest} tokens, but rows have"
                f" {run.data.sequence_length}",
                hint="shorten the prompt, lower samples.max_new_tokens, or raise data.sequence_length",
            )

    def sample(self, step: int) -> list[TextSample]:
        """Continue every prompt. Collective."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        rows = [list(prompt) for prompt in self._prompts]
        is_open = [True] * len(rows)
        for _ in range(self._spec.max_new_tokens):
            longest = max(map(len, rows))
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
            logits = self._engine.next_logits(ids, [len(row) for row in rows])
            for index, token in enumerate(self._choose(logits, generator)):
                if is_open[index]:
                    rows[index].append(token)
                    is_open[index] = token not in self._ends
            if not any(is_open):
                break
        return [
            TextSample(step=step, prompt=prompt, text=self._text(row[len(given) :]), tokens=len(row) - len(given))
            for prompt, given, row in zip(self._spec.prompts, self._prompts, rows, strict=True)
        ]

    def _choose(self, logits: Tensor, generator: torch.Generator) -> list[int]:
        values = logits[:, : self._num_tokens]
        if self._spec.temperature > 0:
            shares = torch.softmax(values.cpu() / self._spec.temperature, dim=-1)
            chosen = torch.multinomial(shares, 1, generator=generator)[:, 0].to(logits.device)
        else:
            chosen = values.argmax(dim=-1)
        if dist.get_world_size() > 1:
            dist.broadcast(chosen, src=0)
        return [int(token) for token in chosen.tolist()]

    def _text(self, tokens: list[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=True))


def _encode(prompt: str, run: RunSpec) -> list[int]:
    """The prompt up to where the model begins to write."""
    if run.data.format == "chat":
        message = {"role": "user", "content": prompt}
        renderer = SampleEncoder(run.data).renderer
        return renderer.encode([message], tools=None, where="samples.prompts", is_prompt=True)
    tokenizer = open_tokenizer(run.data.tokenizer or BYTES)
    return without_end(tokenizer.encode(prompt).tolist(), tokenizer.end_of_document)
