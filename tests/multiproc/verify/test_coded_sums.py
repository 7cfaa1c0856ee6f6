"""Gradients that travel as codes: verified on every layout that has them, and planted bugs in the sums are caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coded_mutations as bugs
import pytest
from gloo_ranks import run_ranks
from mutation_groups import Bug, Group, require_caught
from verify_ranks import small_run, verdicts_in_rank

CHECK = "coded sums"
IN_INT8 = {"preset": "bf16", "reduce": "int8"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 2}},
    "ZeRO-1": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}, "pipeline": {"microbatches": 2}},
    "ZeRO-3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}},
    "HSDP": {"mesh": {"dp_shard": 2, "dp_replicate": 2}, "pipeline": {"microbatches": 2}},
    "a pipeline": {"mesh": {"dp_replicate": 2, "pp": 2}, "pipeline": {"microbatches": 2}},
    "ZeRO-2 in a pipeline": {
        "mesh": {"dp_shard": 2, "pp": 2}, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2},
    },
    "tp": {"mesh": {"dp_replicate": 2, "tp": 2}},
    "tp without sequence parallel": {
        "mesh": {"dp_replicate": 2, "tp": 2}, "tensor_parallel": {"sequence_parallel": False},
    },
    "tp in ZeRO-3": {
        "mesh": {"dp_shard": 2, "tp": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2},
    },
    "tp in ZeRO-3 without sequence parallel": {
        "mesh": {"dp_shard": 2, "tp": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2},
        "tensor_parallel": {"sequence_parallel": False},
    },
    "DDP by node": {"mesh": {"dp_replicate": 4}, "data_parallel": {"reduce_neighbours": 2}},
    "ZeRO-3 by node": {
        "mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3, "reduce_neighbours": 2}, "pipeline": {"microbatches": 2},
    },
    "ep": {"mesh": {"dp_shard": 4, "ep": 2}, "data_parallel": {"zero": 3}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_verified_in_every_format(layout: str, corpus: Path, tmp_path: Path) -> None:
    formats = [{"preset": "fp32", "reduce": "int8"}, IN_INT8, {"reduce": "bfloat16"}, {"reduce": "float8_e4m3"}]
    if layout.startswith("tp in"):
        formats = [{**IN_INT8, "gather": "int8"}, {"reduce": "float8_e4m3", "gather": "float8_e4m3"}]
    plans = [{**LAYOUTS[layout], "precision": one} for one in formats]
    run = small_run(str(corpus), model="mixtral" if layout == "ep" else "llama")
    mesh = LAYOUTS[layout]["mesh"]
    world = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1) * mesh.get("pp", 1) * mesh.get("tp", 1)
    verdicts = run_ranks(verdicts_in_rank, world, run, plans, str(tmp_path), timeout_s=900)[0]
    for verdict in verdicts:
        wrong = [f"{check['name']}: {check['detail']}" for check in verdict["checks"] if not check["ok"]]
        assert not wrong
        told = next(check["detail"] for check in verdict["checks"] if check["name"] == CHECK)
        assert "equal bits" in told
        assert "bound" in told


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_layout_with_error_feedback_is_verified(layout: str, corpus: Path, tmp_path: Path) -> None:
    plans = [fed_back(layout, one) for one in (IN_INT8, {"reduce": "float8_e4m3"}, {"reduce": "bfloat16"})]
    run = small_run(str(corpus), model="mixtral" if layout == "ep" else "llama")
    mesh = LAYOUTS[layout]["mesh"]
    world = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1) * mesh.get("pp", 1) * mesh.get("tp", 1)
    for verdict in run_ranks(verdicts_in_rank, world, run, plans, str(tmp_path), timeout_s=900)[0]:
        wrong = [f"{check['name']}: {check['detail']}" for check in verdict["checks"] if not check["ok"]]
        assert not wrong


def fed_back(layout: str, precision: dict[str, str]) -> dict[str, Any]:
    plan = LAYOUTS[layout]
    return {
        **plan, "precision": precision, "data_parallel": {**plan.get("data_parallel", {}), "error_feedback": True}
    }  # fmt: skip


GROUPS = {
    "ZeRO-3, fed back": Group(plan=fed_back("ZeRO-3", IN_INT8), bugs=(Bug(mutate=bugs.errors_forgotten, check=CHECK),)),
    "DDP, fed back": Group(
        plan=fed_back("DDP", IN_INT8),
        bugs=(
            Bug(mutate=bugs.errors_forgotten, check=CHECK),
            Bug(mutate=bugs.errors_of_the_sum_forgotten, check=CHECK),
        ),
    ),
    "ZeRO-3": Group(
        plan={**LAYOUTS["ZeRO-3"], "precision": IN_INT8},
        bugs=(
            Bug(mutate=bugs.scale_of_another_block, check=CHECK),
            Bug(mutate=bugs.own_share_not_rounded, check=CHECK),
            Bug(mutate=bugs.rounded_at_every_hop, check=CHECK),
            Bug(mutate=bugs.summed_in_codes, check=CHECK),
        ),
    ),
    "tp in ZeRO-3": Group(
        plan={
            **LAYOUTS["tp in ZeRO-3 without sequence parallel"],
            "precision": {"preset": "fp32", "reduce": "int8"},  # bfloat16 would hide that masters of a norm differ
        },
        num_ranks=4,
        bugs=(
            Bug(mutate=bugs.blocks_across_parameters, check=(CHECK, "forward weights")),
            Bug(mutate=bugs.parameters_forgotten, check=("forward weights", "replicas")),
        ),
    ),
    "ZeRO-3 by node, fed back": Group(
        plan=fed_back("ZeRO-3 by node", IN_INT8),
        num_ranks=4,
        bugs=(
            Bug(mutate=bugs.own_nodes_sums_not_rounded, check=CHECK),
            Bug(mutate=bugs.errors_of_nodes_forgotten, check=CHECK),
        ),
    ),
    "DDP": Group(
        plan={**LAYOUTS["DDP"], "precision": IN_INT8},
        bugs=(Bug(mutate=bugs.sum_not_rounded_for_its_owner, check=(CHECK, "forward weights")),),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GROUPS))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)
