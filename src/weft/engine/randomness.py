"""Dropout that depends on (seed, step, global row) and not on the layout.

torch draws one mask for a whole micro-batch, so its rows' masks change with the cut. Here the default generator,
seeded alike on every rank, only numbers the dropout calls; each row's mask comes from (call number, global row).
Replaying a forward with the generator's saved state (activation recompute) replays the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.core.errors import NotBuiltError


def uses_randomness(model: nn.Module) -> bool:
    """Whether any module drops or jitters: nn.Dropout, or an attribute such as attention_dropout above zero."""
    return any(_is_random(module) for module in model.modules())


@contextmanager
def seeded_forward(*, seed: int, step: int, first_row: int, num_rows: int, is_random: bool) -> Iterator[None]:
    """The randomness of one micro-batch: rows `first_row` and on of the global batch of `step`."""
    if not is_random:
        yield
        return
    torch.manual_seed(_mix(seed, step))
    with _RowDropout(first_row=first_row, num_rows=num_rows):
        yield


class _RowDropout(TorchFunctionMode):
    """Replaces dropout and attention dropout by row-wise draws."""

    def __init__(self, *, first_row: int, num_rows: int) -> None:
        super().__init__()
        self.first_row = first_row
        self.num_rows = num_rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        training = kwargs.pop("train", training)  # torch.dropout's name for it
        if not training or p == 0.0:
            return input
        if p == 1.0:
            return input * 0.0
        keep = 1.0 - p
        generator = torch.Generator(device=input.device)
        parts = []
        for row, part in self._rows(input):
            generator.manual_seed(row)
            parts.append(torch.empty_like(part, requires_grad=False).bernoulli_(keep, generator=generator))
        return input * torch.cat(parts).div_(keep)

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = args[0] if args else kwargs.pop("attn_mask", None)
        rest = args[1:]
        seeds = [row for row, _ in self._rows(query)]
        state = _generator_state(query.device)
        outputs = []
        for index, seed in enumerate(seeds):
            row = slice(index, index + 1)
            row_mask = mask if mask is None or mask.shape[0] == 1 or mask.ndim < 4 else mask[row]
            torch.manual_seed(seed)
            outputs.append(F.scaled_dot_product_attention(query[row], key[row], value[row], row_mask, *rest, **kwargs))
        state()
        return torch.cat(outputs)

    def _rows(self, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """(seed, part) of every row of the micro-batch; flattened tokens belong to rows in order."""
        if tensor.ndim == 0 or tensor.shape[0] % self.num_rows:
            raise NotBuiltError(
                f"dropout on a tensor of shape {tuple(tensor.shape)} cannot be assigned to {self.num_rows} rows",
                hint="set the model's dropout to 0 in [model.config]",
            )
        call = int(torch.randint(2**62, ()).item())
        parts = torch.split(tensor, tensor.shape[0] // self.num_rows)
        return [(_mix(call, self.first_row + index), part) for index, part in enumerate(parts)]


def _is_random(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return True
    return any(
        isinstance(value, float | int) and not isinstance(value, bool) and value > 0
        for key, value in vars(module).items()
        if "drop" in key or "jitter" in key
    )


def _generator_state(device: torch.device) -> Callable[[], None]:
    """A function that puts the default generators back to where they are now."""
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)

    return restore


def _mix(first: int, second: int) -> int:
    """A 63-bit seed from two numbers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{first}:{second}".encode(), digest_size=8).digest(), "little") >> 1
