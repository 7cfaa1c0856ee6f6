"""One rank of a world that is not there, with its collectives looped back: finite, its own shards, really trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weft.comm.loopback import loopback_world
from weft.engine import collectives
from weft.engine.ep.exchange import Counts, exchange

NUM_RANKS = 4


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def sharded_blocks(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **options)  # type: ignore[arg-type]
    return model


def own_shard(parameter: nn.Parameter) -> np.ndarray:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach().numpy().copy()


@pytest.mark.parametrize("rank", [0, 2])
def test_gathered_weights_are_the_own_shard_repeated(rank: int) -> None:
    with loopback_world(num_ranks=NUM_RANKS, rank=rank):
        model = sharded_blocks()
        own = {name: own_shard(parameter) for name, parameter in model.named_parameters()}
        for unit in model:
            unit.unshard()
        for name, parameter in model.named_parameters():
            whole = parameter.detach().numpy()
            assert np.isfinite(whole).all()
            np.testing.assert_array_equal(whole, np.concatenate([own[name]] * NUM_RANKS))


@pytest.mark.parametrize("rank", [0, 2])
def test_gradients_are_the_own_slot_of_a_whole_backward(rank: int) -> None:
    """The same gathered weights in a plain model, its gradients cut by hand."""
    inputs = torch.arange(48, dtype=torch.float32).view(3, 16) / 48
    with loopback_world(num_ranks=NUM_RANKS, rank=rank):
        model = sharded_blocks()
        alone = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
        with torch.no_grad():
            for plain, parameter in zip(alone.parameters(), model.parameters(), strict=True):
                plain.copy_(torch.from_numpy(np.concatenate([own_shard(parameter)] * NUM_RANKS)))
        model(inputs).square().sum().backward()
        alone(inputs).square().sum().backward()
        for plain, parameter in zip(alone.parameters(), model.parameters(), strict=True):
            assert plain.grad is not None
            assert isinstance(parameter.grad, DTensor)
            wanted = plain.grad.chunk(NUM_RANKS)[rank].numpy()
            np.testing.assert_allclose(parameter.grad.to_local().numpy(), wanted, rtol=1e-6)


def test_a_mixed_precision_step_moves_the_shards() -> None:
    with loopback_world(num_ranks=NUM_RANKS):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded_blocks(mp_policy=policy)
        before = [own_shard(parameter) for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(torch.ones(2, 16)).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for old, parameter in zip(before, model.parameters(), strict=True):
            new = own_shard(parameter)
            assert np.isfinite(new).all()
            assert (new != old).any()


def test_slots_of_others_are_left_alone_and_not_read() -> None:
    """NaN in the slots of the others reaches nothing."""
    with loopback_world(num_ranks=NUM_RANKS, rank=1):
        given = torch.full((NUM_RANKS, 3), float("nan"))
        given[1] = torch.tensor([1.0, 2.0, 3.0])
        np.testing.assert_array_equal(collectives.scattered(given.view(-1), world(), 0).numpy(), [1.0, 2.0, 3.0])


def test_an_all_to_all_returns_what_was_sent() -> None:
    sizes, rows = [1, 2, 0, 1], torch.arange(8.0).view(4, 2)
    with loopback_world(num_ranks=NUM_RANKS):
        found = exchange(rows, Counts(sent=tuple(sizes), received=tuple(sizes)), world())
        functional = all_to_all_single(rows, sizes, sizes, world())
        np.testing.assert_array_equal(found.numpy(), rows.numpy())
        np.testing.assert_array_equal(functional.numpy(), rows.numpy())
        with pytest.raises(ValueError, match="what is sent"):
            exchange(rows, Counts(sent=(1, 2, 0, 1), received=(4, 0, 0, 0)), world())


def test_a_sum_is_left_unchanged_in_groups_of_any_axis() -> None:
    with loopback_world(num_ranks=NUM_RANKS, rank=3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        assert (mesh.get_local_rank("outer"), mesh.get_local_rank("inner")) == (1, 1)
        for name in ("outer", "inner"):
            group = mesh.get_group(name)
            found = collectives.summed(torch.tensor([2.0]), group)
            assert (group.size(), float(found)) == (2, 2.0)
