"""Expert parallelism on fake tensors: sizes that a router decides are the expected ones, as in the planner."""

from __future__ import annotations

from typing import Any

import pytest
from samples import by_default

from weft.comm.observer import BUFFERS
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm
from weft.dryrun.run import DryRun, dry_run
from weft.plan.ask import estimate_plan

CONFIG = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024,
}  # fmt: skip
RUN = RunSpec.from_tables(
    {
        "model": {"type": "mixtral", "config": CONFIG},
        "data": {"sequence_length": 128},
        "train": {"global_batch": 16},
    }
)
ROUNDING = 0.02  # rows are whole numbers
ALLOCATED = 5e-3  # small tensors are rounded up


def plan_of(dispatcher: str, **tables: Any) -> Plan:
    given = {"mesh": {"dp_shard": 8, "ep": 4}, "expert_parallel": {"dispatcher": dispatcher}}
    return Plan.from_tables(given | tables)


def rows(traffic: Any) -> dict[tuple[str, ...], tuple[int, int]]:
    return {
        (row["axis"], row["collective"], row["phase"]): (int(row["count"]), int(row["bytes"]))
        for row in traffic
        if row["bytes"] and row["phase"] != BUFFERS  # counts of experts, which the planner does not price
    }


EXCHANGES = [
    ("pairs", "none", "activations", 1), ("tokens", "none", "float8", 1), ("gather", "full", "activations", 2),
    ("pairs", "none", "float8", 1), ("pairs", "full", "activations", 2), ("tokens", "none", "activations", 1),
    ("tokens", "full", "activations", 2), ("gather", "none", "activations", 1), ("gather", "none", "float8", 1),
]  # fmt: skip


@pytest.mark.parametrize(("dispatcher", "policy", "wire", "chunks"), by_default(EXCHANGES[:3], EXCHANGES))
def test_traffic_and_states_are_those_of_the_planner(dispatcher: str, policy: str, wire: str, chunks: int) -> None:
    exchange = {"dispatcher": dispatcher, "wire": wire, "chunks": chunks}
    plan = plan_of(dispatcher, expert_parallel=exchange, activations={"policy": policy})
    found, predicted = dry_run(RUN, plan, on_gpu=False), estimate_plan(RUN, plan, "8xCPU")
    sent, planned = rows(found.traffic), rows(predicted.traffic)
    assert {key: count for key, (count, _) in sent.items()} == {key: count for key, (count, _) in planned.items()}
    for key, (_, nbytes) in sent.items():
        assert nbytes == pytest.approx(planned[key][1], rel=ROUNDING if key[0] == "ep" else 0), key
    for term in ("weights", "optimizer_state"):
        assert found.terms[term] == pytest.approx(predicted.memory_terms[MemoryTerm(term)], rel=ALLOCATED), term


SHARED_RANKS: list[tuple[dict[str, int], str, bool]] = [
    ({"tp": 4, "ep": 2}, "folded", True), ({"dp_shard": 4, "tp": 2, "ep": 2}, "width", False),
    ({"tp": 4, "ep": 2}, "folded", False), ({"dp_shard": 4, "tp": 2, "ep": 2}, "width", True),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "tensor", "sequence_parallel"), by_default(SHARED_RANKS[:2], SHARED_RANKS))
def test_tensor_ranks_with_experts_are_those_of_the_planner(
    mesh: dict[str, int], tensor: str, sequence_parallel: bool
) -> None:
    plan = plan_of(
        "tokens",
        mesh=mesh,
        expert_parallel={"dispatcher": "tokens", "tensor": tensor},
        tensor_parallel={"sequence_parallel": sequence_parallel},
        activations={"policy": "full"},
    )
    found, predicted = dry_run(RUN, plan, on_gpu=False), estimate_plan(RUN, plan, f"{plan.num_ranks}xCPU")
    sent, planned = rows(found.traffic), rows(predicted.traffic)
    assert {key: count for key, (count, _) in sent.items()} == {key: count for key, (count, _) in planned.items()}
    for key, (_, nbytes) in sent.items():
        assert nbytes == pytest.approx(planned[key][1], rel=ROUNDING if key[0] == "ep" else 1e-9), key
    for term in ("weights", "optimizer_state"):
        assert found.terms[term] == pytest.approx(predicted.memory_terms[MemoryTerm(term)], rel=ALLOCATED), term


WIDE = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 4096,
    "sliding_window": None,
}  # fmt: skip
CLOSE = 0.02


@pytest.mark.parametrize(
    ("dispatcher", "zero", "policy"), [("pairs", 3, "none"), ("gather", 1, "full")], ids=["pairs", "gather"]
)
def test_memory_is_that_of_the_planner(dispatcher: str, zero: int, policy: str) -> None:
    tables = {"model": {"type": "mixtral", "config": WIDE}, "data": {"sequence_length": 2048}}
    run = RunSpec.from_tables({**tables, "train": {"global_batch": 8}})
    plan = plan_of(
        dispatcher,
        data_parallel={"zero": zero},
        activations={"policy": policy},
        compile={"enabled": False},
        kernels={"loss": "whole"},
    )
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, "8xH200")
    planned = sum(nbytes for term, nbytes in predicted.memory_terms.items() if term != MemoryTerm.FRAMEWORK)
    assert planned == pytest.approx(found.peak_bytes, rel=CLOSE), predicted.peak_at


def test_an_uneven_router_fills_the_busiest_rank() -> None:
    def measured(dispatcher: str, imbalance: float) -> DryRun:
        return dry_run(RUN, plan_of(dispatcher), on_gpu=False, imbalance=imbalance)

    for dispatcher in ("tokens", "gather"):
        even, uneven = (measured(dispatcher, imbalance) for imbalance in (1.0, 2.0))
        assert uneven.terms["activations"] > 1.2 * even.terms["activations"], dispatcher
        assert "2 x the tokens of an even router" in uneven.notes[-1]
    assert rows(even.traffic) == rows(uneven.traffic)  # all rows travel, whatever the router chooses
