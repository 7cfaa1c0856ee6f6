"""Sums in codes by node, four ranks as two nodes of two: the bits of plain rounding, fewer bytes between nodes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import coded_mutations as bugs
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from weft.comm.coded_sums import CodedSum, Nodes, scatter_sum
from weft.comm.ledger import TrafficLedger
from weft.comm.watch import OperatorWatch
from weft.verify.coded_sums import SUMS, SumWatch
from weft.verify.plain_codes import rounded

RANKS, NEAR, COUNT = 4, 2, 6000
SIZES = (1000, 512, 30, 4458)  # of the parameters of an all-reduce


def drawn(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(COUNT, generator=generator) * torch.logspace(-4, 0, COUNT)


def nodes_of(rank: int) -> Nodes:
    inside = [dist.new_group([at, at + 1]) for at in (0, 2)]
    between = [dist.new_group([at, at + NEAR]) for at in (0, 1)]
    return Nodes(inside[rank // NEAR], between[rank % NEAR])


def summed(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    group, nodes, found = dist.group.WORLD, nodes_of(rank), {}
    assert group is not None
    axes = {str(nodes.inside.group_name): "inside", str(nodes.between.group_name): "between"}
    for name in names:
        ledger, values = TrafficLedger(axes=axes, phase=lambda: "backward"), drawn(rank)
        with OperatorWatch(ledger):
            CodedSum(group, name=name, nodes=nodes).sum(values, sizes=SIZES)
        share = scatter_sum(drawn(rank).view(world, -1), group, name, nodes=nodes)
        sent = {(str(row["axis"]), str(row["collective"])): int(row["bytes"]) for row in ledger.rows()}
        found[name] = {"sum": values, "share": share, "bytes": sent}
    return found


def by_node(name: str, sizes: list[int] | tuple[int, ...]) -> torch.Tensor:
    """The sum of the rounded sums of both nodes."""
    once = [rounded(drawn(rank), name, sizes).values.double() for rank in range(RANKS)]
    nodes = [torch.stack(once[at : at + NEAR]).sum(0).float() for at in (0, NEAR)]
    return torch.stack([rounded(node, name, sizes).values.double() for node in nodes]).sum(0).float()


def test_a_sum_by_node() -> None:
    names = ["bfloat16", "int8", "float8_e4m3"]
    found = run_ranks(summed, RANKS, names)
    exact = torch.stack([drawn(rank).double() for rank in range(RANKS)]).sum(0)
    for name in names:
        expected = rounded(by_node(name, SIZES), name, SIZES).values
        shares = by_node(name, [COUNT // RANKS] * RANKS).view(RANKS, -1)
        for rank, one in enumerate(found):
            assert torch.equal(one[name]["sum"], expected), f"{name}: the same on every rank"
            assert torch.equal(one[name]["share"], shares[rank])
        error = float((expected.double() - exact).norm() / exact.norm())
        assert error < {"bfloat16": 5e-3, "int8": 2e-2, "float8_e4m3": 6e-2}[name]
    sent = found[0]["int8"]["bytes"]
    assert set(sent) == {(axis, name) for axis in ("inside", "between") for name in ("all_to_all", "all_gather")}
    flat_between = COUNT * (RANKS - NEAR) / RANKS  # bytes of codes that leave a node in an all-to-all over all ranks
    for name in ("all_to_all", "all_gather"):
        assert sent["between", name] < 0.55 * flat_between, "half of it with two ranks per node"
        assert sent["inside", name] < 0.55 * COUNT


def fed_back(rank: int, world: int, feeds_back: bool) -> dict[str, float]:
    group, nodes, count = dist.group.WORLD, nodes_of(rank), COUNT // world
    assert group is not None
    sums, errors = CodedSum(group, name="int8", nodes=nodes), torch.zeros(world, count) if feeds_back else None
    if feeds_back:
        sums.feed_back([COUNT], device=torch.device("cpu"))
    exact, arrived, shares = (torch.zeros(COUNT, dtype=torch.float64) for _ in range(3))
    watch = SumWatch()
    for step in range(20):
        values = drawn(rank) + 1e-3 * drawn(rank + world * (step + 1))
        exact += (
            torch.stack([drawn(one) + 1e-3 * drawn(one + world * (step + 1)) for one in range(world)]).double().sum(0)
        )
        given = values.clone()
        if step < 2:
            with watch.watching():
                sums.sum(values, sizes=SIZES)
                own = scatter_sum(given.view(world, -1), group, "int8", errors, place="a unit", nodes=nodes)
        else:
            sums.sum(values, sizes=SIZES)
            own = scatter_sum(given.view(world, -1), group, "int8", errors, place="a unit", nodes=nodes)
        arrived += values
        rows = torch.empty(world, count)
        dist.all_gather(list(rows.unbind()), own)
        shares += rows.view(-1)
    judged = watch.judge(SUMS)
    assert not judged.wrong
    assert 0 < judged.error < judged.bound
    return {"all_reduce": float((arrived - exact).norm()), "reduce_scatter": float((shares - exact).norm())}


BUGS: dict[str, Any] = {
    "": nullcontext,
    "not rounded": bugs.own_nodes_sums_not_rounded,
    "not fed back": bugs.errors_of_nodes_forgotten,
    "scale": bugs.scale_of_another_block,
}


def judged(rank: int, world: int) -> dict[str, int]:
    group, nodes, found = dist.group.WORLD, nodes_of(rank), {}
    assert group is not None
    for name, bug in BUGS.items():
        sums, errors, watch = CodedSum(group, name="int8", nodes=nodes), torch.zeros(world, COUNT // world), SumWatch()
        sums.feed_back([COUNT], device=errors.device)
        with watch.watching(), bug():
            for step in range(2):
                sums.sum(drawn(rank + world * step), sizes=SIZES)
                scatter_sum(drawn(rank + world * step).view(world, -1), group, "int8", errors, place="a", nodes=nodes)
        found[name] = len(watch.judge(SUMS).wrong)
    return found


def test_the_watch_finds_bugs_of_sums_by_node() -> None:
    found = run_ranks(judged, RANKS)[0]
    assert found.pop("") == 0
    assert all(found.values()), found


def test_errors_of_both_roundings_are_fed_back() -> None:
    plain, fed = run_ranks(fed_back, RANKS, False)[0], run_ranks(fed_back, RANKS, True)[0]
    for name, error in plain.items():
        assert fed[name] < 0.2 * error
