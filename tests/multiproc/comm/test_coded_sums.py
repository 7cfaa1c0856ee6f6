"""Sums in codes on four ranks: equal on all, within the bound, whatever the order of ranks, a quarter of the bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from weft.comm.coded_sums import CodedSum, scatter_sum
from weft.comm.ledger import TrafficLedger
from weft.comm.watch import OperatorWatch
from weft.verify.plain_codes import rounded

RANKS, COUNT = 4, 5000  # 1250 elements per share: the last block of each is short
SIZES = (1000, 512, 30, 3458)  # of the parameters of an all-reduce


def drawn(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(COUNT, generator=generator) * torch.logspace(-4, 0, COUNT)


def summed(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, Any] = {}
    for name in names:
        ledger = TrafficLedger(axes={}, phase=lambda: "backward")
        sums, values = CodedSum(group, name=name), drawn(rank)
        turned = drawn((rank + 1) % world)  # the same numbers on other ranks
        with OperatorWatch(ledger):
            sums.sum(values, sizes=SIZES)
        first, second = drawn(rank), drawn(rank + world)
        futures = [sums.begin(first, sizes=SIZES), sums.begin(second)]  # as the buckets of a backward
        sums.finish()
        assert all(future.done() for future in futures)
        sums.sum(turned, sizes=SIZES)
        share = scatter_sum(drawn(rank).view(world, -1), group, name)
        found[name] = {
            "sum": values, "again": first, "other": second, "turned": turned, "share": share,
            "bytes": sum(int(row["bytes"]) for row in ledger.rows()),
        }  # fmt: skip
    return found


def test_a_sum_in_codes() -> None:
    names = ["bfloat16", "int8", "float8_e4m3"]
    found = run_ranks(summed, RANKS, names)
    exact = torch.stack([drawn(rank).double() for rank in range(RANKS)]).sum(0)
    for name in names:
        of_ranks = [one[name] for one in found]
        once = torch.stack([rounded(drawn(rank), name, SIZES).values for rank in range(RANKS)])
        expected = rounded(once.double().sum(0).float(), name, SIZES).values
        shares = [COUNT // RANKS] * RANKS
        of_shares = torch.stack([rounded(drawn(rank), name, shares).values for rank in range(RANKS)])
        scattered = of_shares.double().sum(0).float()
        for rank, one in enumerate(of_ranks):
            assert torch.equal(one["sum"], expected), f"{name}: rounded twice, each rank's own share too"
            assert torch.equal(one["again"], expected), "a sum that overlapped another"
            assert torch.equal(one["turned"], expected), "another order of ranks"
            assert torch.equal(one["other"], of_ranks[0]["other"])
            assert torch.equal(one["share"], scattered.view(RANKS, -1)[rank]), "rounded once"
        error = float((expected.double() - exact).norm() / exact.norm())
        assert error < {"bfloat16": 4e-3, "int8": 1.5e-2, "float8_e4m3": 5e-2}[name]
    ratio = found[0]["int8"]["bytes"] / (2 * 4 * COUNT * (RANKS - 1) / RANKS)
    assert 0.254 < ratio < 0.28, "of 5000 numbers: shares are whole blocks"
