"""The request that every rank of a verification reads; and every plan of a world size. JSON in and out, no torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.legality import broken_rules
from weft.train.devices import DeviceType

SCHEDULES = {
    "naive": 1, "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "zero_bubble": 1, "zbv": 2,
    "dualpipev": 2, "pipedream": 1, "pipedream_2bw": 1,
}  # fmt: skip  # with the stages per rank


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    run: RunSpec
    plans: list[Plan]  # resolved; a recompute mixture may be open
    steps: int = 5
    as_is: bool = False
    device: DeviceType = "cpu"
    answer: str | None = None  # the file for rank 0's verdicts

    def to_json(self) -> str:
        plans = [plan.model_dump(mode="json", exclude_none=True) for plan in self.plans]
        return json.dumps({**vars(self), "run": self.run.model_dump(mode="json", exclude_none=True), "plans": plans})

    @staticmethod
    def from_json(text: str) -> VerifyRequest:
        fields = json.loads(text)
        plans = [Plan.from_tables(tables) for tables in fields["plans"]]
        return VerifyRequest(**{**fields, "run": RunSpec.from_tables(fields["run"]), "plans": plans})


def every_plan(num_ranks: int, base: dict[str, Any], run: RunSpec) -> list[Plan]:
    """Every plan of `num_ranks` that weft executes for the run."""
    return [plan for plan, reason in judged_plans(num_ranks, base, run) if reason is None]


def judged_plans(num_ranks: int, base: dict[str, Any], run: RunSpec) -> Iterator[tuple[Plan, WeftError | None]]:
    """Every plan of `num_ranks`: data parallel; tensor, pipeline, expert and context parallel with the first reason
    against each."""
    others = [
        *secondary_plans(num_ranks, base),
        *tensor_parallel_plans(num_ranks, base),
        *pipeline_plans(num_ranks, base, run),
    ]
    others += [*expert_parallel_plans(num_ranks, base), *context_parallel_plans(num_ranks, base)]
    yield from ((plan, None) for plan in data_parallel_plans(num_ranks, base))
    yield from ((plan, next(broken_rules(plan, run), None)) for plan in others)


def data_parallel_plans(num_ranks: int, base: dict[str, Any]) -> list[Plan]:
    """Every legal data-parallel plan of `num_ranks`: DDP, ZeRO-1/2/3 over all, and HSDP over every proper divisor."""
    return _filled(_data_layouts(num_ranks), base)


def secondary_plans(num_ranks: int, base: dict[str, Any]) -> list[Plan]:
    """ZeRO-3 over all ranks, with a secondary shard over every proper divisor."""
    sizes = [size for size in range(2, num_ranks) if num_ranks % size == 0]
    mesh = {"dp_shard": num_ranks}
    return _filled([{"mesh": mesh, "data_parallel": {"zero": 3, "secondary_shard": size}} for size in sizes], base)


def tensor_parallel_plans(num_ranks: int, base: dict[str, Any]) -> list[Plan]:
    """One-dimensional tensor parallelism: alone with SP and LP on and off, and beside DDP and ZeRO-1/2/3."""
    given = {key: value for key, value in base.get("tensor_parallel", {}).items() if key != "mode"}
    layouts: list[dict[str, Any]] = [
        {"mesh": {"tp": num_ranks}, "tensor_parallel": {"sequence_parallel": sp, "loss_parallel": lp}}
        for sp, lp in itertools.product((True, False), repeat=2)
        if num_ranks > 1
    ]
    for tp in (degree for degree in range(2, num_ranks) if num_ranks % degree == 0):
        beside = num_ranks // tp
        layouts += [
            {
                "mesh": {"dp_shard" if zero else "dp_replicate": beside, "tp": tp},
                "data_parallel": {"zero": zero},
                "tensor_parallel": given,
            }
            for zero in (0, 1, 2, 3)
        ]
    return _filled(layouts, base)


def pipeline_plans(num_ranks: int, base: dict[str, Any], run: RunSpec) -> list[Plan]:
    """Every schedule over all ranks, if there are enough micro-batches; 1F1B with DDP, ZeRO and tensor parallelism."""
    layouts: list[dict[str, Any]] = [
        {"mesh": {"pp": num_ranks}, "pipeline": {"schedule": name, "virtual_stages": stages}}
        for name, stages in SCHEDULES.items()
        if num_ranks > 1
    ]
    for pp in (degree for degree in range(2, num_ranks) if num_ranks % degree == 0):
        beside = num_ranks // pp
        meshes = [({"dp_shard" if zero else "dp_replicate": beside}, zero) for zero in (0, 1, 2, 3)]
        layouts += [
            {"mesh": {"pp": pp, **mesh}, "data_parallel": {"zero": zero}, "pipeline": {"schedule": "1f1b"}}
            for mesh, zero in [*meshes, ({"tp": beside}, 0)]
        ]
    for layout in layouts:
        rows = run.train.global_batch // (num_ranks // layout["mesh"]["pp"] // layout["mesh"].get("tp", 1))
        layout["pipeline"]["microbatches"] = next((count for count in (4, 2) if rows % count == 0), 1)
    return _filled(layouts, {key: value for key, value in base.items() if key != "pipeline"})


def expert_parallel_plans(num_ranks: int, base: dict[str, Any]) -> list[Plan]:
    """Experts over all ranks with ZeRO-1, over every divisor with ZeRO-3, and beside two tensor ranks.

    Each dispatcher occurs, unless the base plan names one.
    """
    given = base.get("expert_parallel", {})
    degrees = [degree for degree in range(2, num_ranks + 1) if num_ranks % degree == 0]
    layouts: list[dict[str, Any]] = [_experts(num_ranks, ep, 1, dispatcher="pairs") for ep in degrees[-1:]]
    layouts += [_experts(num_ranks, ep, 3, dispatcher="tokens") for ep in degrees]
    if num_ranks % 2 == 0:
        beside = num_ranks // 2
        folded = _experts(beside, 2, 3 if beside > 1 else 0, dispatcher="gather", tp=2)
        layouts += [folded, *([_with_width(folded)] if beside % 2 == 0 else [])]
    for layout in layouts:
        layout["expert_parallel"] |= given
        layout["tensor_parallel"] = {
            key: value for key, value in base.get("tensor_parallel", {}).items() if key != "mode"
        }
    return _filled(layouts, base)


def context_parallel_plans(num_ranks: int, base: dict[str, Any]) -> list[Plan]:
    """Each attention over all ranks with replicated states, over every divisor with ZeRO-3, and beside tensor ranks."""
    given, layouts = base.get("context_parallel", {}), list[dict[str, Any]]()
    for cp in (degree for degree in range(2, num_ranks + 1) if num_ranks % degree == 0):
        meshes = [
            {"dp_shard": num_ranks // cp, "cp": cp},
            *([{"cp": cp, "tp": num_ranks // cp}] if cp < num_ranks else []),
        ]
        layouts += [
            {"mesh": meshes[0], "data_parallel": {"zero": 3}, **_context(cp, {"split": "contiguous", **given})},
            *({"mesh": mesh, **_context(cp, given)} for mesh in meshes[1:]),
        ]
    if num_ranks > 1:
        attentions: list[dict[str, Any]] = [{"attention": name} for name in ("gather", "ulysses", "ring")]
        attentions += [{"attention": "ring", "ulysses": size} for size in range(2, num_ranks) if num_ranks % size == 0]
        asked = [given] if "attention" in given else [{**each, **given} for each in attentions]
        layouts += [{"mesh": {"cp": num_ranks}, **_context(num_ranks, each)} for each in asked]
    return _filled(layouts, base)


def _context(cp: int, given: dict[str, Any]) -> dict[str, Any]:
    """The section, without groups that these ranks or their attention do not have."""
    size = int(given.get("ulysses", 1))
    has_groups = 1 < size < cp and cp % size == 0 and given.get("attention") != "ulysses"
    kept = given if has_groups else {key: value for key, value in given.items() if key != "ulysses"}
    return {"context_parallel": kept}


def _experts(dp_shard: int, ep: int, zero: int, *, dispatcher: str, tp: int = 1) -> dict[str, Any]:
    return {
        "mesh": {"dp_shard": dp_shard, "tp": tp, "ep": ep},
        "data_parallel": {"zero": zero},
        "expert_parallel": {"dispatcher": dispatcher},
    }


def _with_width(layout: dict[str, Any]) -> dict[str, Any]:
    return {**layout, "expert_parallel": {**layout["expert_parallel"], "tensor": "width"}}


def _data_layouts(num_ranks: int) -> list[dict[str, Any]]:
    layouts: list[dict[str, Any]] = [{"mesh": {"dp_replicate": num_ranks}, "data_parallel": {"zero": 0}}]
    for shard in (size for size in range(1, num_ranks + 1) if num_ranks % size == 0):
        if shard == 1 and num_ranks > 1:
            continue
        layouts += [
            {"mesh": {"dp_replicate": num_ranks // shard, "dp_shard": shard}, "data_parallel": {"zero": zero}}
            for zero in (1, 2, 3)
        ]
    return layouts


def _filled(layouts: list[dict[str, Any]], base: dict[str, Any]) -> list[Plan]:
    """Layouts completed with the other sections of the base plan."""
    kept = {key: value for key, value in base.items() if key not in ("mesh", "data_parallel", "tensor_parallel")}
    return [Plan.from_tables({**kept, **layout}) for layout in layouts]
