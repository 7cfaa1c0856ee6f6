"""The watch of coded collectives, on two ranks: quiet about right ones, and every planted bug is found."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import coded_mutations as bugs
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from weft.comm.coded_sums import CodedSum, gather_codes, scatter_sum
from weft.verify.coded_sums import GATHERS, SUMS, SumWatch

CASES: dict[str, Any] = {
    "": nullcontext,
    "scale of another block": bugs.scale_of_another_block,
    "own share not rounded": bugs.own_share_not_rounded,
    "rounded at every hop": bugs.rounded_at_every_hop,
    "summed in codes": bugs.summed_in_codes,
}


def judged(rank: int, world: int) -> dict[str, tuple[int, int, float, float]]:
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for name, bug in CASES.items():
        values = torch.randn(2 * 700, generator=torch.Generator().manual_seed(rank)) * torch.logspace(-3, 0, 1400)
        rows = torch.empty(world, 700)
        watch = SumWatch()
        with watch.watching(), bug():
            scatter_sum(values.view(world, -1), group, "int8")
            CodedSum(group, name="int8").sum(values.clone())
            gather_codes(rows, values[:700].clone(), group, "int8")
        sums, gathers = watch.judge(SUMS), watch.judge(GATHERS)
        assert (sums.num_sums, gathers.num_sums) == (2, 1)
        found[name] = (len(sums.wrong), len(gathers.wrong), sums.error, sums.bound)
        assert sums.check().ok == (not sums.wrong)
    return found


FED_BACK: dict[str, Any] = {
    "": nullcontext,
    "forgotten": bugs.errors_forgotten,
    "of the sum forgotten": bugs.errors_of_the_sum_forgotten,
}


def judged_over_steps(rank: int, world: int) -> dict[str, list[str]]:
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for name, bug in FED_BACK.items():
        sums, errors, watch = CodedSum(group, name="int8"), torch.zeros(world, 700), SumWatch()
        sums.feed_back([1399, 1399], device=errors.device)
        with watch.watching(), bug():
            for step in range(2):
                values = torch.randn(1400, generator=torch.Generator().manual_seed(step * world + rank))
                scatter_sum(values.view(world, -1), group, "int8", errors, place="a unit")
                sums.begin(values[1:].clone(), place=0)
                sums.begin(values[1:] * 2, place=1)
                sums.finish()
        found[name] = watch.judge(SUMS).wrong
    return found


def test_errors_that_are_not_fed_back_are_found() -> None:
    found = run_ranks(judged_over_steps, 2, timeout_s=200.0)[0]
    assert found[""] == []
    assert "its gradient and the errors before (place a unit)" in found["forgotten"][0]
    assert "its gradient and the errors before (place 0)" in found["of the sum forgotten"][0]


def test_every_bug_in_a_sum_of_codes_is_found() -> None:
    found = run_ranks(judged, 2, timeout_s=200.0)[0]
    assert found[""][:2] == (0, 0)
    assert 0 < found[""][2] < found[""][3], "an error within its bound"
    missed = [name for name, (sums, _, _, _) in found.items() if name and not sums]
    assert not missed
    assert found["scale of another block"][1], "and in a gather"
