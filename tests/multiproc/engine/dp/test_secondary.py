"""The secondary shard of ZeRO-3: the bits of plain ZeRO-3, and backwards that gather among neighbours alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny import FAMILIES, build_engine, global_batch

from weft.comm.observer import named_group
from weft.core.run_spec import ModelSpec
from weft.engine.measure.meter import StepMeter

# two experts on four ranks are sharded along an inner dimension
FEW_EXPERTS = ModelSpec(type="mixtral", config={**FAMILIES["mixtral"].config, "num_local_experts": 2})
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulated": ("llama", {"pipeline": {"microbatches": 2}}),
    "bf16, recomputed": ("qwen3-tied", {"precision": {"preset": "bf16"}, "activations": {"policy": "full"}}),
    "codes": ("llama", {"precision": {"preset": "bf16", "gather": "int8"}}),
    "context parallel": ("llama", {"mesh": {"dp_shard": 2, "cp": 2}}),
    "inner dimension": (FEW_EXPERTS, {}),
    "frozen block": ("llama", {}),
    "HSDP": ("llama", {"mesh": {"dp_replicate": 2, "dp_shard": 4}}),
}
BY_DEFAULT = ["accumulated", "codes", "frozen block"]
STEPS = 3


def trained(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        family, tables = CASES[name]
        for size in (0, 2):
            plan = {"mesh": {"dp_shard": 4}, **tables, "data_parallel": {"zero": 3, "secondary_shard": size}}
            frozen = ["model.embed_tokens.*", "model.layers.0.*"] if name == "frozen block" else []
            engine = build_engine(family, plan, frozen=frozen)
            values: list[Any] = []
            for step in range(STEPS):
                batch = engine.share_of(global_batch(step))
                record = engine.step(batch)
                values += [record.loss, record.grad_norm]
                values.append(engine.evaluate(batch).loss)  # forwards alone
            meter = StepMeter(engine)
            with meter.measuring():
                meter.next_step()
                engine.step(engine.share_of(global_batch(STEPS)))
            rows = {(row["axis"], row["collective"], row["phase"]): row for row in meter.traffic}
            wrong = [f"{row.component} {row.found}" for row in engine.dtypes() if not row.ok]
            groups = [dist.get_process_group_ranks(named_group(group)) for group in engine.topology.more_axes]
            assert groups == ([[rank // 2 * 2, rank // 2 * 2 + 1]] if size else [])
            found[f"{name} {size}"] = (values, rows, wrong)
            engine.close()
    return found


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (4, BY_DEFAULT),
        pytest.param(4, ["bf16, recomputed", "context parallel", "inner dimension"], marks=pytest.mark.extended),
        pytest.param(8, ["HSDP"], marks=pytest.mark.slow),
    ],
)
def test_the_bits_of_zero_3_and_the_bytes_of_neighbours(world: int, names: list[str]) -> None:
    ranks = run_ranks(trained, world, names, timeout_s=240.0)
    for name in names:
        plain, rows, _ = ranks[0][f"{name} 0"]
        values, near, wrong = ranks[0][f"{name} 2"]
        assert not wrong, name
        assert values == plain, name
        assert all(one[f"{name} 2"][0] == values for one in ranks), name
        counts, expected = ({key: row["count"] for key, row in one.items()} for one in (near, rows))
        assert counts == expected, name
        forward, backward = (("dp_shard", "all_gather", phase) for phase in ("forward", "backward"))
        assert near[forward] == rows[forward], name
        full = rows[backward]["bytes"] * 4 / 3  # of four shards three travel, of two halves one
        if name == "codes":
            full = 2 * sum(parameter.numel() for parameter in build_engine("llama").parameters)
        assert near[backward]["bytes"] == full / 2, name
