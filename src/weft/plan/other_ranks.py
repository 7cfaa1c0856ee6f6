"""A plan on another number of ranks: data-parallel degrees change, the model's axes and the global batch stay.

    micro-batches per rank = the fewest that divide the batch and are not larger than the plan's own

So a job restarts on the hosts that are left with the memory of its micro-batches, and its curve is the same within
rounding. Checkpoints do not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from weft.core.errors import MeshError
from weft.core.plan import Mesh, Plan
from weft.core.run_spec import RunSpec
from weft.core.secondary import check_neighbours, check_secondary
from weft.plan.legality import broken_rules, is_legal


def with_data_parallel_ranks(plan: Plan, run: RunSpec, num_ranks: int, *, has_own_model: bool = False) -> Plan:
    """The plan on exactly `num_ranks` ranks; raises the reason if there is none."""
    others = plan.num_ranks // plan.mesh.dp_degree
    if num_ranks % others:
        raise MeshError(
            f"the plan's model takes {others} ranks, and {num_ranks} is no multiple of it",
            hint="elastic plans change the number of data-parallel ranks only",
        )
    reasons = []
    for candidate in _candidates(plan, run, num_ranks // others):
        reason = next(broken_rules(candidate, run, has_own_model=has_own_model), None)
        if reason is None:
            return candidate
        reasons.append(reason.message)
    why = reasons[0] if reasons else f"a global batch of {run.train.global_batch} does not divide over them"
    raise MeshError(f"the plan does not run on {num_ranks} ranks: {why}", hint="use another number of ranks")


def usable_ranks(plan: Plan, run: RunSpec, most: int) -> int:
    """The largest number of ranks up to `most` that the plan can change to; 0 if there is none."""
    others = plan.num_ranks // plan.mesh.dp_degree
    for degree in range(most // others, 0, -1):
        if any(is_legal(candidate, run) for candidate in _candidates(plan, run, degree)):
            return degree * others
    return 0


def _candidates(plan: Plan, run: RunSpec, dp_degree: int) -> Iterator[Plan]:
    """Plans of this data-parallel degree: expert parallelism stays if it can."""
    microbatches = _microbatches(plan, run, dp_degree)
    if microbatches is None:
        return
    pipeline = plan.pipeline.model_copy(update={"microbatches": microbatches})
    shard = _shard_degree(plan, dp_degree)
    mesh = _changed(plan.mesh, dp_replicate=dp_degree // shard, dp_shard=shard)
    pool = math.prod(getattr(mesh, axis) for axis in plan.expert_parallel.axis_names)
    for ep in dict.fromkeys((plan.mesh.ep, math.gcd(plan.mesh.ep, pool))):
        if pool % ep == 0:
            changed = plan.model_copy(update={"mesh": _changed(mesh, ep=ep), "pipeline": pipeline})
            yield _without_illegal_groups(changed)


def _without_illegal_groups(plan: Plan) -> Plan:
    """Groups of neighbours that these ranks do not divide into are dropped. A secondary shard changes no bit of a step,
    sums by node their roundings."""
    dp, changed = plan.data_parallel, dict[str, int]()
    if any(check_secondary(dp.secondary_shard, zero=dp.zero, shards=plan.mesh.dp_shard * plan.mesh.cp)):
        changed["secondary_shard"] = 0
    if any(check_neighbours(dp.reduce_neighbours, is_coded=True, ranks=plan.num_reducing)):
        changed["reduce_neighbours"] = 0
    return plan.model_copy(update={"data_parallel": dp.model_copy(update=changed)}) if changed else plan


def _shard_degree(plan: Plan, dp_degree: int) -> int:
    """dp_shard: all of it where there are no replicas; under HSDP the same groups, or the largest that divide them."""
    if plan.data_parallel.zero == 0:
        return 1
    if plan.mesh.dp_replicate == 1:
        return dp_degree
    return math.gcd(plan.mesh.dp_shard, dp_degree)


def _microbatches(plan: Plan, run: RunSpec, dp_degree: int) -> int | None:
    batch = run.train.global_batch
    most_rows = max(1, batch // (plan.mesh.dp_degree * plan.pipeline.microbatches))
    if batch % dp_degree:
        return None
    rows = batch // dp_degree
    return next(count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= most_rows)


def _changed(mesh: Mesh, **degrees: Any) -> Mesh:
    return mesh.model_copy(update=degrees)
