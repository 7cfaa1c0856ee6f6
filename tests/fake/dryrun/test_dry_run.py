"""One rank of large worlds on fake tensors: its terms, its traffic, and the formulas of `weft plan` beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from samples import by_default

from weft.core.errors import MeshError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import DryRun, dry_run
from weft.plan.ask import estimate_plan

LLAMA = {
    "type": "llama",
    "config": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 8192,
    },
}  # fmt: skip
GPT2 = {"type": "gpt2", "config": {"n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 512, "vocab_size": 8192}}
BF16 = {"precision": {"preset": "bf16"}}
LOW = {"precision": {"preset": "bf16", "optimizer_state": "bfloat16"}}
MASTER_FREE = {"precision": {**LOW["precision"], "master_weights": "bfloat16"}}


def run_of(model: dict[str, Any], **train: Any) -> RunSpec:
    return RunSpec.from_tables(
        {"model": model, "data": {"sequence_length": 256}, "train": {"global_batch": 64, **train}}
    )


def plan_of(zero: int, ranks: int, *, microbatches: int = 1, **tables: Any) -> Plan:
    axis = "dp_shard" if zero else "dp_replicate"
    return Plan.from_tables(
        {"mesh": {axis: ranks}, "data_parallel": {"zero": zero}, "pipeline": {"microbatches": microbatches}, **tables}
    )


def counts(found: DryRun) -> dict[tuple[str, str], int]:
    return {(str(row["collective"]), str(row["phase"])): int(row["count"]) for row in found.traffic}


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (1, {("all_gather", "forward"): 3, ("reduce_scatter", "backward"): 3}),
        (2, {("all_gather", "forward"): 3, ("reduce_scatter", "backward"): 6}),
        (3, {("all_gather", "forward"): 6, ("all_gather", "backward"): 6, ("reduce_scatter", "backward"): 6}),
    ],
)
def test_collectives_are_those_of_the_stage(zero: int, expected: dict[tuple[str, str], int]) -> None:
    assert counts(dry_run(run_of(LLAMA), plan_of(zero, 8, microbatches=2))) == expected


TERMS: list[tuple[int, int, dict[str, Any]]] = [
    (0, 1, {}), (0, 2, BF16), (1, 2, {}), (2, 2, BF16), (3, 2, MASTER_FREE),
    (3, 1, BF16), (3, 2, {}), (3, 2, BF16), (0, 1, LOW), (2, 2, LOW), (0, 2, MASTER_FREE),
]  # fmt: skip


@pytest.mark.parametrize(("zero", "microbatches", "precision"), by_default(TERMS[:5], TERMS))
def test_the_planner_agrees_term_by_term(zero: int, microbatches: int, precision: dict[str, Any]) -> None:
    run, plan = run_of(LLAMA), plan_of(zero, 8, microbatches=microbatches, **precision)
    found = dry_run(run, plan, on_gpu=False)
    predicted = estimate_plan(run, plan, "8xCPU")
    assert predicted.memory_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    for term in ("weights", "optimizer_state", "gradients", "activations", "logits_and_loss"):
        guess, real = predicted.memory_terms.get(term, 0), found.terms.get(term, 0)
        assert guess == pytest.approx(real, rel=0.02, abs=0.01 * found.peak_bytes), term
    wire = {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in found.traffic}
    guessed = {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in predicted.traffic}
    assert guessed == pytest.approx(wire, rel=1e-6)


SECONDARY = [(2, 1, {"preset": "bf16", "gather": "int8"}), (4, 1, {}), (2, 2, {"preset": "bf16"})]


@pytest.mark.parametrize(("size", "replicas", "precision"), by_default(SECONDARY[:1], SECONDARY))
def test_the_planner_knows_a_secondary_shard(size: int, replicas: int, precision: dict[str, str]) -> None:
    run = run_of(LLAMA)
    plan = Plan.from_tables({
        "mesh": {"dp_shard": 8 // replicas, "dp_replicate": replicas}, "precision": precision,
        "data_parallel": {"zero": 3, "secondary_shard": size},
    })  # fmt: skip
    found, predicted = dry_run(run, plan, on_gpu=False), estimate_plan(run, plan, "8xCPU")
    assert predicted.memory_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    gathered = found.terms["gathered_weights"]
    compute_bytes = 2 if precision else 4
    assert gathered == pytest.approx(compute_bytes * found.num_parameters / size, rel=0.01)  # of all units, at the loss
    assert predicted.memory_terms["gathered_weights"] == pytest.approx(gathered, rel=0.01)
    wire = {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in found.traffic}
    guessed = {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in predicted.traffic}
    assert guessed == pytest.approx(wire, rel=1e-5)


CODED = [(0, {"reduce": "int8"}), (3, {"reduce": "int8", "gather": "int8"}), (2, {"reduce": "bfloat16"})]


@pytest.mark.parametrize(("zero", "formats"), CODED)
def test_gradients_and_weights_that_travel_as_codes(zero: int, formats: dict[str, str]) -> None:
    run, plan = run_of(LLAMA), plan_of(zero, 8, microbatches=2, precision={"preset": "bf16", **formats})
    found, predicted = dry_run(run, plan, on_gpu=False), estimate_plan(run, plan, "8xCPU")
    assert predicted.memory_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    wire = {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in found.traffic}
    guessed = {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in predicted.traffic}
    assert guessed == pytest.approx(wire, rel=5e-4)  # shares of an all-reduce are whole blocks


BY_NODE = [({"dp_replicate": 8}, 0), ({"dp_shard": 8}, 3), ({"dp_shard": 8, "dp_replicate": 2}, 2)]


@pytest.mark.parametrize(("mesh", "zero"), by_default(BY_NODE[:2], BY_NODE))
def test_gradients_that_are_summed_by_node(mesh: dict[str, int], zero: int) -> None:
    run, reduced = run_of(LLAMA), {"zero": zero, "reduce_neighbours": 4}
    plan = Plan.from_tables({"mesh": mesh, "precision": {"preset": "bf16", "reduce": "int8"}, "data_parallel": reduced})
    found, predicted = dry_run(run, plan, on_gpu=False), estimate_plan(run, plan, f"{plan.num_ranks}xCPU")
    assert predicted.memory_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    wire = {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in found.traffic}
    guessed = {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in predicted.traffic}
    assert guessed == pytest.approx(wire, rel=5e-4)
    halves = [name for axis, name, _ in wire if axis == "dp_between"]
    assert sorted(halves) == (["all_gather", "all_to_all"] if zero == 0 else ["all_to_all"])


WIDE_STREAM = {"preset": "bf16", "residual": "float32"}
STREAMS = [(0, 1, "none"), (3, 1, "none"), (2, 2, "full"), (0, 1, "selective")]


@pytest.mark.parametrize(("zero", "microbatches", "policy"), by_default(STREAMS[1:2], STREAMS))
def test_the_planner_knows_a_stream_in_float32(zero: int, microbatches: int, policy: str) -> None:
    run, tables = run_of(LLAMA), {"precision": WIDE_STREAM, "activations": {"policy": policy}}
    plan = plan_of(zero, 8, microbatches=microbatches, **tables)
    found, predicted = dry_run(run, plan, on_gpu=False), estimate_plan(run, plan, "8xCPU")
    assert predicted.memory_bytes == pytest.approx(found.peak_bytes, rel=0.005)
    assert predicted.memory_terms["activations"] == pytest.approx(found.terms["activations"], rel=0.02)


FED_BACK = [({"dp_replicate": 4}, 0), ({"dp_shard": 4}, 3), ({"dp_shard": 2, "dp_replicate": 2}, 2)]


@pytest.mark.parametrize(("mesh", "zero"), by_default(FED_BACK[1:2], FED_BACK))
def test_errors_of_gradients_weigh_what_the_planner_says(mesh: dict[str, int], zero: int) -> None:
    run = run_of(LLAMA)
    plain, fed = (
        Plan.from_tables({
            "mesh": mesh, "pipeline": {"microbatches": 2}, "precision": {"preset": "bf16", "reduce": "int8"},
            "data_parallel": {"zero": zero, "error_feedback": is_fed},
        })
        for is_fed in (False, True)
    )  # fmt: skip
    found, predicted = dry_run(run, fed, on_gpu=False), estimate_plan(run, fed, "4xCPU")
    assert predicted.memory_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    assert predicted.memory_terms["optimizer_state"] == pytest.approx(found.terms["optimizer_state"], rel=0.01)
    more = found.terms["optimizer_state"] - dry_run(run, plain, on_gpu=False).terms["optimizer_state"]
    shards = mesh.get("dp_shard", 1)
    times = 1.0 if zero in (0, 3) else 1 + 1 / shards  # a shard travels to the replicas besides
    assert more == pytest.approx(4 * found.num_parameters * times, rel=0.02)
    assert found.traffic == dry_run(run, plain, on_gpu=False).traffic


@pytest.mark.parametrize("precision", [{}, BF16])
def test_the_planner_agrees_where_the_vocabulary_is_sharded(precision: dict[str, Any]) -> None:
    """The loss needs most: in bf16 its softmax has the chunk's logits in float32 too."""
    run, plan = run_of(LLAMA, global_batch=16), Plan.from_tables({"mesh": {"tp": 4}, **precision})
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, "4xH100-80GB")
    assert found.peak.operator == "aten._softmax"
    inside = predicted.memory_bytes - predicted.memory_terms["framework"]
    assert inside == pytest.approx(found.peak_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("zero", "gather"), by_default([(3, "float8")], [(2, "float8"), (3, "float8"), (2, "weights")])
)
def test_the_planner_knows_what_weights_in_float8_weigh(zero: int, gather: str) -> None:
    run, plan = run_of(LLAMA), plan_of(zero, 8, microbatches=2, **BF16, float8={"linears": "all", "gather": gather})
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, "8xH100-80GB")
    wire, guessed = (
        {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in rows}
        for rows in (found.traffic, predicted.traffic)
    )
    assert guessed == pytest.approx(wire, rel=1e-6)
    assert ("dp_shard", "all_reduce", "forward") in wire or gather == "weights"  # the scales


WIDE = {"type": "llama", "config": {**LLAMA["config"], "num_key_value_heads": 8}}  # type: ignore[dict-item]
SCALES: list[tuple[str, bool, str]] = [
    ("rowwise", True, "none"), ("tensorwise", False, "full"), ("blockwise", True, "none"), ("tensorwise", True, "none"),
    ("rowwise", False, "full"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "is_stream", "policy"), by_default(SCALES[:1], SCALES))
def test_scales_of_tensor_parallel_ranks_are_counted(recipe: str, is_stream: bool, policy: str) -> None:
    run = run_of(WIDE)
    plan = Plan.from_tables({
        "mesh": {"tp": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}, **BF16,
        "tensor_parallel": {"sequence_parallel": is_stream}, "activations": {"policy": policy},
        "float8": {"linears": "all", "recipe": recipe},
    })  # fmt: skip
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, "4xH100-80GB")
    wire, guessed = (
        {(row["axis"], row["collective"], row["phase"]): (row["count"], row["bytes"]) for row in rows}
        for rows in (found.traffic, predicted.traffic)
    )
    assert {key: count for key, (count, _) in guessed.items()} == {key: count for key, (count, _) in wire.items()}
    for key, (_, nbytes) in wire.items():
        assert guessed[key][1] == pytest.approx(nbytes, rel=1e-3), key


BUDGETS = [
    (0, 1, (1, 1), False), (2, 2, (1, 0), False), (0, 1, (1, 1), True), (3, 1, (1, 1), True), (3, 1, (2, 0), True)
]  # fmt: skip


@pytest.mark.parametrize(("zero", "microbatches", "mixture", "is_wide"), by_default([BUDGETS[1], BUDGETS[4]], BUDGETS))
def test_the_planner_agrees_on_a_budget(zero: int, microbatches: int, mixture: tuple[int, int], is_wide: bool) -> None:
    """Where the loss needs most, and where blocks do: the peak of the last case is in the fourth of six blocks."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 1000}
    sizes = sizes if is_wide else {"num_hidden_layers": 3}
    run = run_of({**LLAMA, "config": {**LLAMA["config"], **sizes}}, global_batch=8 if is_wide else 64)  # type: ignore[dict-item]
    budget = {"policy": "budget", "mixture": mixture}
    plan = plan_of(zero, 8, microbatches=microbatches, **BF16, activations=budget)
    found, predicted = dry_run(run, plan, on_gpu=False), estimate_plan(run, plan, "8xCPU")
    assert predicted.memory_bytes == pytest.approx(found.peak_bytes, rel=0.02)
    if not is_wide:  # elsewhere a block computed again has all its activations when most is alive
        assert predicted.memory_terms["activations"] == pytest.approx(found.terms["activations"], rel=0.02)


FUSED: list[tuple[int, int, dict[str, Any]]] = [(0, 2, {}), (2, 2, BF16), (3, 1, BF16), (3, 2, BF16)]


@pytest.mark.parametrize(("zero", "microbatches", "precision"), by_default([FUSED[1]], FUSED))
def test_the_planner_agrees_where_the_loss_is_fused(zero: int, microbatches: int, precision: dict[str, Any]) -> None:
    run = run_of(LLAMA)
    plan = plan_of(zero, 8, microbatches=microbatches, **precision, kernels={"loss": "fused"})
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, "8xH100-80GB")
    inside = predicted.memory_bytes - predicted.memory_terms["framework"]
    assert inside == pytest.approx(found.peak_bytes, rel=0.02)
    whole = dry_run(run, plan_of(zero, 8, microbatches=microbatches, **precision))
    assert found.peak_bytes < 0.95 * whole.peak_bytes


@pytest.mark.parametrize("zero", by_default([], [0, 2], extended=[2]))
def test_compiled_blocks_keep_less_and_the_planner_says_how_much(zero: int) -> None:
    run, tables = run_of(LLAMA), {**BF16, "kernels": {"loss": "fused"}}
    plan = plan_of(zero, 8, **tables, compile={"enabled": True})
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, "8xH100-80GB")
    assert predicted.memory_bytes - predicted.memory_terms["framework"] == pytest.approx(found.peak_bytes, rel=0.02)
    assert found.peak_bytes < 0.95 * dry_run(run, plan_of(zero, 8, **tables)).peak_bytes


LARGE_TABLES = [(3, 8, 1, "adamw"), (1, 1, 1, "adamw8bit"), (2, 1, 4, "sgd")]


@pytest.mark.parametrize(("zero", "ranks", "microbatches", "optimizer"), by_default(LARGE_TABLES[:1], LARGE_TABLES))
def test_the_planner_knows_the_moments_of_large_tables(
    zero: int, ranks: int, microbatches: int, optimizer: str
) -> None:
    """Where little else is there: few tokens, blocks computed again, logits in stretches."""
    large: dict[str, Any] = {**LLAMA, "config": {**LLAMA["config"], "vocab_size": 64_000}}  # type: ignore[dict-item]
    run = run_of(large, optimizer=optimizer, global_batch=ranks * microbatches)
    fused = {"activations": {"policy": "full"}, "kernels": {"loss": "fused"}}
    plan = Plan.from_tables(
        {
            "mesh": {"dp_shard": ranks},
            "data_parallel": {"zero": zero},
            "pipeline": {"microbatches": microbatches},
            **BF16,
            **fused,
        }
    )
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, f"{ranks}xH100-80GB")
    inside = predicted.memory_bytes - predicted.memory_terms["framework"]
    assert inside == pytest.approx(found.peak_bytes, rel=0.01)


def test_a_world_of_thousands() -> None:
    found = dry_run(run_of(LLAMA, global_batch=4096), plan_of(3, 4096, **BF16))
    assert found.world_size == 4096
    # two moments, and a step counter of 512 B for each of 9 parameters a block and three outside
    assert found.terms["optimizer_state"] == 2 * found.terms["weights"] + 512 * (2 * 9 + 3)


def test_uneven_shards_leave_the_last_rank_less() -> None:
    odd = {**LLAMA, "config": {**LLAMA["config"], "vocab_size": 8200}}  # type: ignore[dict-item]
    plan = plan_of(3, 16, **BF16)
    first, last = (dry_run(run_of(odd), plan, rank=rank) for rank in (0, 15))
    assert last.terms["weights"] == first.terms["weights"]  # fully_shard pads the last shard
    assert last.terms["optimizer_state"] < first.terms["optimizer_state"]
    assert last.rank == 15


def test_dropout_is_replayed_where_blocks_are_computed_again() -> None:
    kept, again = (dry_run(run_of(GPT2), plan_of(0, 4, activations={"policy": policy})) for policy in ("none", "full"))
    assert again.terms["activations"] < 0.5 * kept.terms["activations"]


def test_dropout_fp16_and_frozen_parameters_run() -> None:
    found = dry_run(
        run_of(GPT2, frozen=["transformer.wte.weight"]), plan_of(2, 4, precision={"preset": "fp16"}, microbatches=2)
    )
    assert found.peak_bytes == sum(found.terms.values())
    assert found.terms["optimizer_state"] < 2 * found.terms["weights"]


def test_nothing_is_left_behind() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    from weft.engine import updates
    from weft.engine.dp import choose

    before = (DeviceMesh.__init__, choose.Replicated, updates.read_is_finite)
    dry_run(run_of(LLAMA), plan_of(0, 8))
    assert (DeviceMesh.__init__, choose.Replicated, updates.read_is_finite) == before
    assert not dist.is_initialized()


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(MeshError, match="no rank 8 among 8"):
        dry_run(run_of(LLAMA), plan_of(3, 8), rank=8)


@pytest.mark.extended
def test_eight_bit_states_take_a_quarter() -> None:
    plan = plan_of(3, 4, **BF16)
    whole, eight = (dry_run(run_of(GPT2, optimizer=name), plan) for name in ("adamw", "adamw8bit"))
    assert eight.terms["optimizer_state"] == pytest.approx(whole.terms["optimizer_state"] * (1 + 4 / 256) / 4, rel=0.03)


@pytest.mark.extended
def test_weights_without_masters_take_half_and_so_do_their_states() -> None:
    whole, low = (dry_run(run_of(LLAMA), plan_of(3, 4, **precision)) for precision in (BF16, MASTER_FREE))
    for term in ("weights", "optimizer_state"):
        assert low.terms[term] == pytest.approx(whole.terms[term] / 2, rel=2e-3), term  # blocks of 512 B
    assert low.moments["resuming_bytes"] == pytest.approx(4 * low.terms["weights"], rel=0.01)


def test_a_module_and_an_operator_are_named_where_most_is_alive() -> None:
    small = {**LLAMA, "config": {**LLAMA["config"], "vocab_size": 640}}  # type: ignore[dict-item]
    found = dry_run(run_of(small), plan_of(3, 2, **BF16))
    assert found.peak.phase == "backward"
    assert found.peak.module.startswith("model.")
    largest = found.peak.largest[0]
    assert largest.module.startswith("model.layers.*.mlp")
    assert largest.count == 2
    assert sum(found.terms.values()) == found.peak_bytes


def test_reserved_is_at_least_allocated_and_moments_are_told() -> None:
    found = dry_run(run_of(LLAMA), plan_of(3, 8, **BF16))
    assert found.peak_bytes <= found.reserved_bytes["expandable_segments"] < 2 * found.peak_bytes
    assert found.peak_bytes <= found.reserved_bytes["fixed_segments"] < 3 * found.peak_bytes
    held = found.terms["weights"] + found.terms["optimizer_state"]
    assert found.moments["resuming_bytes"] >= held
    assert held < found.moments["evaluation_bytes"] < found.peak_bytes
    # fully_shard's shard and one unit whole
    assert found.moments["loading_bytes"] >= found.terms["weights"]
    assert found.moments["saving_host_bytes"] == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("preset", by_default(["fp16"], ["fp32", "fp16", "bf16"]))
def test_experts_run_in_every_precision(preset: str) -> None:
    experts = {"type": "mixtral", "config": {**LLAMA["config"], "num_hidden_layers": 2, "num_local_experts": 4}}  # type: ignore[dict-item]
    found = dry_run(run_of(experts), plan_of(3, 4, precision={"preset": preset}))
    assert found.peak_bytes == sum(found.terms.values())


@pytest.mark.parametrize("ranks", by_default([16], [8, 16]))
def test_the_planner_agrees_on_experts_of_any_number(ranks: int) -> None:
    """8 experts on 8 ranks go by experts; on 16 by rows of experts, which are copied once more when gathered."""
    sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "vocab_size": 1024}
    config = {**LLAMA["config"], **sizes, "num_local_experts": 8, "num_experts_per_tok": 2}  # type: ignore[dict-item]
    run, plan = run_of({"type": "mixtral", "config": config}, global_batch=ranks), plan_of(3, ranks, **BF16)
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, f"{ranks // 8}x8xH100-80GB")
    allocated = predicted.memory_bytes - predicted.memory_terms["framework"]
    assert allocated == pytest.approx(found.peak_bytes, rel=0.01)
    assert predicted.memory_terms["weights"] == pytest.approx(found.terms["weights"], rel=0.01)


@pytest.mark.parametrize("layers", by_default([4], [2, 4]))
def test_the_planner_agrees_where_blocks_outweigh_the_loss(layers: int) -> None:
    """The peak lies at the end of a block's backward, or where the first block arrives: not at the loss."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 1000}
    run = run_of({**LLAMA, "config": {**LLAMA["config"], **wide}}, global_batch=8)  # type: ignore[dict-item]
    plan = plan_of(3, 8, **BF16)
    found = dry_run(run, plan, on_gpu=False)
    assert found.peak.phase == "backward"
    assert found.peak.module.startswith("model.layers.")
    assert estimate_plan(run, plan, "8xCPU").memory_bytes == pytest.approx(found.peak_bytes, rel=0.02)


def test_a_layer_that_may_be_dropped_is_not_a_question() -> None:
    """OPT compares one random number with its layerdrop, which a dry run has to answer."""
    opt = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
           "word_embed_proj_dim": 64}  # fmt: skip
    assert dry_run(run_of({"type": "opt", "config": opt}), plan_of(0, 4)).peak_bytes > 0
