"""Chooses the fastest of torch's fused attention kernels for a model's shape: timed before the first step on a GPU, and
cached per machine. Torch's default order is right for most shapes, so another kernel must beat it clearly.

Rank 0 chooses for all: two kernels round differently, so ranks must not choose by their own timings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.compiler import config as compiler_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.core.json_files import parse_json_table
from weft.core.plan import Plan
from weft.engine.measure.timer import now, seconds_between

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TORCHS_OWN = "torch's own choice"
MIN_SPEEDUP = 1.05  # below this speedup a timing is noise, and would change the rounding for nothing
MIN_MULTIPLICATIONS = 1e9  # multiplications per row: below, no kernel makes a step slow
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The inputs of one block's attention on one rank, without an explicit mask."""

    rows: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: str

    @property
    def is_worth_timing(self) -> bool:
        """Depends on sizes equal on all ranks, so without the rows: all ranks join the collective, or none."""
        return self.heads * self.length**2 * self.head_dim >= MIN_MULTIPLICATIONS

    def on(self, device: torch.device) -> str:
        """The cache key of a choice: this shape on this device model with this torch."""
        return json.dumps([torch.cuda.get_device_name(device), torch.__version__, *asdict(self).values()])


class AttentionKernel:
    """The kernel of one engine. Torch's default until `choose`, and if there is nothing to choose."""

    def __init__(self, model: nn.Module, plan: Plan, device: torch.device) -> None:
        self._model, self._plan, self._device = model, plan, device
        self.chosen = TORCHS_OWN
        config = getattr(model, "config", None)
        is_fused = getattr(config, "_attn_implementation", None) == "sdpa"
        self._is_open = plan.kernels.attention == "auto" and device.type == "cuda" and is_fused

    def choose(self, microbatch: Mapping[str, torch.Tensor]) -> None:
        """Choose before the first forward, once. Collective."""
        if not self._is_open:
            return
        self._is_open = False
        shape = shape_of(self._model, self._plan, microbatch)
        if shape is not None and shape.is_worth_timing:
            self.chosen = self._choice_of_rank_0(shape)

    def _choice_of_rank_0(self, shape: Shape) -> str:
        names = [TORCHS_OWN, *KERNELS]
        place = torch.zeros((), dtype=torch.int64, device=self._device)
        if dist.get_rank() == 0:
            found = cached_choice(shape.on(self._device), lambda: fastest(shape, self._device))
            place.fill_(names.index(found))
            torch.cuda.empty_cache()
        dist.broadcast(place, src=0)
        return names[int(place.item())]

    def preferred(self) -> AbstractContextManager[None]:
        """Forwards inside run the chosen kernel if it supports the input, else the first of torch's order."""
        if self.chosen == TORCHS_OWN:
            return nullcontext()
        first = KERNELS[self.chosen]
        return prefer_kernels(first, *(other for other in KERNELS.values() if other is not first), SDPBackend.MATH)


@contextmanager
def prefer_kernels(*kernels: SDPBackend) -> Iterator[None]:
    """Attention inside runs the first of these that supports the input. Torch's cache of compiled blocks does not
    include the choice in its key, and would return a block with another kernel."""
    tag = " ".join([compiler_config.cache_key_tag, "attention", *(kernel.name for kernel in kernels)])
    with sdpa_kernel(list(kernels), set_priority=True), compiler_config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield


def shape_of(model: nn.Module, plan: Plan, microbatch: Mapping[str, torch.Tensor]) -> Shape | None:
    """None if the batch has masks, or the config lacks the number of heads or the width."""
    given: Any = getattr(model, "config", None)
    config = given.get_text_config() if given is not None else None
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if set(microbatch) - {"input_ids", "labels"} or not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    rows, length = microbatch["input_ids"].shape
    kv_heads, tp = getattr(config, "num_key_value_heads", None) or heads, plan.mesh.tp
    return Shape(
        rows=rows,
        heads=max(1, heads // tp),
        kv_heads=max(1, kv_heads // tp),
        length=length,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        dtype=plan.precision.policy().weights,
    )


def fastest(
    shape: Shape, device: torch.device, *, seconds: Callable[[Shape, torch.device, str], float] | None = None
) -> str:
    """The kernel that is clearly faster than torch's default, forward and backward together; else the default."""
    timed = seconds or _seconds
    own_s = timed(shape, device, TORCHS_OWN)
    times = {name: timed(shape, device, name) for name in KERNELS}
    best = min(times, key=times.__getitem__)
    return best if times[best] * MIN_SPEEDUP <= own_s else TORCHS_OWN


def _seconds(shape: Shape, device: torch.device, name: str) -> float:
    """The minimum of a few runs; infinite if the kernel does not support the shape."""
    dtype = getattr(torch, shape.dtype)
    query, key, value = (
        torch.randn(shape.rows, heads, shape.length, shape.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    taken: Any = nullcontext() if name == TORCHS_OWN else sdpa_kernel(KERNELS[name])
    times: list[float] = []
    try:
        with taken:
            for _ in range(_REPEATS):
                begin = now(device)
                is_grouped = shape.heads != shape.kv_heads
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
                torch.autograd.grad(out, (query, key, value), out)
                end = now(device)
                torch.cuda.synchronize(device)
                times.append(seconds_between(begin, end))
    except RuntimeError:  # "No available kernel", or out of memory beside the model: keep torch's order
        return float("inf")
    return min(times)


# --- the cache ------------------------------------------------------------------------------------------------------


def cached_choice(key: str, find: Callable[[], str], *, path: Path | None = None) -> str:
    """The cached choice for `key` on this machine, else the result of `find`, which is cached."""
    path = path or _cache_path()
    known = _read(path)
    if known.get(key) not in (TORCHS_OWN, *KERNELS):
        known[key] = find()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(known, indent=1), encoding="utf-8")
            written.replace(path)
        except OSError:
            pass  # without a writable cache every run times again
    return str(known[key])


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse_json_table(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _cache_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "attention.json"
