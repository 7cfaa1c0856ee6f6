"""A fake world: the `fake` process group, fake tensors, and the patches that they need.

Each patch names the failure without it; all are undone at the end. They use private names of torch and transformers,
because no public API announces fake tensors: tests/fake/dryrun fails if one of them moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
import torch.distributed.tensor._sharding_prop as sharding
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft.comm.sums as sums
import weft.engine.activations.dropout as randomness
import weft.engine.activations.host_slots as host_slots
import weft.engine.buffers.changes as buffers
import weft.engine.buffers.sync as buffer_sync
import weft.engine.cp.blocks as attention_blocks
import weft.engine.dp.choose as choose
import weft.engine.ep.counts as expert_counts
import weft.engine.kernels.float8 as float8
import weft.engine.kernels.float8_experts as float8_experts
import weft.engine.kernels.float8_products as float8_products
import weft.engine.kernels.head_loss as head_loss
import weft.engine.mesh as mesh
import weft.engine.offload.ahead as ahead
import weft.engine.ownership as ownership
import weft.engine.pp.apply as pipeline
import weft.engine.pp.p2p as p2p
import weft.engine.pp.stages as stages
import weft.engine.router.apply as router
import weft.engine.updates as updates
from weft.core.experts import Routing
from weft.core.float8_section import EMULATED
from weft.dryrun.kernels import Kernel, gpu_attention
from weft.dryrun.replicas import FakeReplicated
from weft.dryrun.streams import CurrentStream
from weft.models.ep.routers import find_routers
from weft.models.pp.split import split_model
from weft.models.shape.fake import transformers_patches

_MESH_METHODS = ("__init__", "__getitem__", "_flatten", "_unflatten", "_create_sub_mesh", "get_local_rank",
                 "get_coordinate", "_hash_key")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FakeWorld:
    """Inside `mode` nothing is allocated; `stream` is the current stream, `live` counts what would be."""

    mode: FakeTensorMode
    stream: CurrentStream
    on_gpu: bool
    live: LiveBytes


class LiveBytes:
    """Bytes of the fake device that tensors hold now, as `count` finds them."""

    def __init__(self) -> None:
        self.count: Callable[[], int] = int

    def __call__(self, _device: torch.device) -> int:
        return self.count()


@contextmanager
def fake_world(*, num_ranks: int, rank: int, attention: Kernel | None, imbalance: float = 1.0) -> Iterator[FakeWorld]:
    """Rank `rank` of `num_ranks`, alone in this process; `attention` is its GPU's kernel, None for a CPU.

    Routers choose the experts of the rank `imbalance` times as often as even ones.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without a process group, and one exists already")
    stream, live = CurrentStream(), LiveBytes()
    with ExitStack() as stack:
        for patch in [
            *_patches(),
            _expected_counts(imbalance),
            *stream.patches(),
            *(_gpu_patches(attention, live) if attention else []),
        ]:
            stack.enter_context(patch)
        # DTensor caches results by mesh, and the meshes of two ranks compare equal
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        stack.callback(_clear_sharding_prop_cache)
        _fill_tables()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        stack.callback(dist.destroy_process_group)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        yield FakeWorld(mode=mode, stream=stream, on_gpu=attention is not None, live=live)


def _fill_tables() -> None:
    """Fill the tables that an 8-bit optimizer caches: inside the mode they would have no values."""
    try:
        from torchao.optim import subclass_8bit
    except ImportError:
        return  # no 8-bit optimizer without torchao
    subclass_8bit.get_qmap_signed()
    subclass_8bit.get_qmap_unsigned()


def _sum_inside_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, *, is_only: bool
) -> torch.Tensor:
    if is_only:
        return left.new_empty(left.shape[1], right.shape[1])
    return total if total is not None else left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)


def _gpu_patches(kernel: Kernel, live: LiveBytes) -> list[Any]:
    # a CPU fuses attention where a GPU writes the scores, and vice versa
    attend = gpu_attention(kernel)
    return [
        # the device is a fake CPU, whose memory the host's would be
        mock.patch.object(host_slots, "HOST", torch.device("meta")),
        # chunks of offloaded states come and go beside the blocks of a GPU
        mock.patch.object(ahead, "hides_copies", _returns(True)),
        mock.patch.object(ahead, "allocated_bytes", live),
        # a GPU's matmul accumulates in place; a CPU's allocates a tensor
        mock.patch.object(head_loss, "_add_product", _sum_inside_product),
        # a CPU multiplies float8 in float32, on copies
        mock.patch.object(float8, "_multiply", float8.multiply_on_gpu),
        mock.patch.object(float8_products, "has_kernel", lambda recipe, _device: recipe not in EMULATED),
        # flash attention of a context's part needs no mask on a GPU
        mock.patch.object(attention_blocks, "is_on_gpu", _returns(True)),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(randomness, "_attend", attend),
    ]


def _patches() -> list[Any]:
    found = [
        *transformers_patches(),
        # DTensor infers shapes in the ambient fake mode, with global tensors that a tracker would count
        mock.patch.object(sharding, "detect_fake_mode", return_value=None),
        # a mesh does arithmetic on a real tensor of ranks
        mock.patch.object(mesh, "init_device_mesh", _outside(device_mesh.init_device_mesh)),
        mock.patch.object(ownership, "local_index", _outside(ownership.local_index)),
        # the pipeline split runs the model's own forward on tensors with values
        mock.patch.object(pipeline, "split_model", _outside(split_model)),
        # finding routers runs copies of blocks on tensors with values
        mock.patch.object(router, "find_routers", _outside(find_routers)),
        # DDP's reducer is C++ that reads memory
        mock.patch.object(choose, "Replicated", FakeReplicated),
        # messages of an all-reduce of ours would never arrive
        mock.patch.object(sums.GroupSum, "_exchange", _returns(True)),
        mock.patch.object(sums, "ranks_per_node", lambda group: group.size()),
        # fully_shard creates all shards of a parameter, one per rank, and keeps two
        mock.patch.object(fsdp_param, "_chunk_with_empty", _Chunks),
        # values read by the host, which do not exist here
        mock.patch.object(updates, "read_is_finite", return_value=True),
        mock.patch.object(stages, "read_is_nan", _returns(False)),
        mock.patch.object(float8_experts, "read_ends", _even_ends),
        mock.patch.object(buffers, "has_other_values", _returns(False)),
        mock.patch.object(buffer_sync, "read_any", _returns(False)),
        mock.patch.object(buffer_sync, "read_min", lambda mine, **_: mine),
        mock.patch.object(randomness, "draw_call_number", return_value=0),
        # a message that never arrives would stay in memory until the end of the step
        mock.patch.object(p2p, "has_left", _returns(True)),
        mock.patch.object(torch, "rand", _rand),  # layer drop compares one random number with a threshold
    ]
    methods = {
        name: device_mesh.DeviceMesh.__dict__[name] for name in _MESH_METHODS if name in device_mesh.DeviceMesh.__dict__
    }
    found += [mock.patch.object(device_mesh.DeviceMesh, name, _outside(method)) for name, method in methods.items()]
    getter = device_mesh.DeviceMesh.mesh.fget  # type: ignore[attr-defined]
    return [*found, mock.patch.object(device_mesh.DeviceMesh, "mesh", property(_outside(getter)))]


def _expected_counts(imbalance: float) -> Any:
    """The sizes of exchanges between experts are read from the router's choices, which do not exist here."""

    def expected(routing: Routing, **counts: torch.Tensor) -> list[tuple[int, ...]]:
        found = routing.expected(imbalance=imbalance)
        return [found[name] for name in counts]

    return mock.patch.object(expert_counts, "read_counts", expected)


def _even_ends(ends: torch.Tensor, num_rows: int) -> list[int]:
    """Groups of rows of experts, whose sizes have no values here."""
    return [num_rows * (group + 1) // len(ends) for group in range(len(ends))]


def _returns(answer: bool) -> Callable[..., bool]:
    """A constant function. A mock would record its arguments and so keep them alive."""
    return lambda *_, **__: answer


_torch_rand = torch.rand


def _rand(*size: Any, **options: Any) -> Any:
    """`torch.rand` with a value for scalars, which models compare with a threshold."""
    is_number = size == ((),) or size == ([],) or not (size or options)
    return 0.5 if is_number else _torch_rand(*size, **options)


class _Chunks:
    """`torch.chunk` into a fixed number of shards, made on demand: thousands of views take minutes."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self._tensor.shape[self._dim]
        begin = min(index * self._length, size)
        return self._tensor.narrow(self._dim, begin, min(self._length, size - begin))


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on real tensors, independent of the ambient mode."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return called
