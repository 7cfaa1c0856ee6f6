"""Offload in the planner: bytes on device, host and disk, seconds of a pipeline of copies, where the update runs.

Each defect that the formulas had is a test here: its docstring names the wrong figure.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import columns_with, legal_plans, one, plan_with, request_of, requests, tiny_llama, view_with

from weft.core.offload_sizes import CHUNK_ELEMENTS, SLOTS
from weft.core.terms import MemoryTerm, StepTerm
from weft.plan.arithmetic import explain_memory
from weft.plan.estimate import Estimate, estimate, fitting
from weft.plan.memory.offloaded import staged_states
from weft.plan.memory.peak import MemoryEstimate, estimate_memory
from weft.plan.offload import DAY_S, choose_update
from weft.plan.offloaded_blocks import choose_blocks
from weft.plan.request import Request
from weft.plan.rules import check_plan
from weft.plan.search import search
from weft.plan.space import Freedom
from weft.plan.time.compute import block_seconds
from weft.plan.time.state_stream import (
    DEVICE_PIPELINE,
    HOST_PIPELINE,
    UPDATE_PASSES,
    host_update_rate,
    landing_seconds,
    update_seconds,
)
from weft.plan.time.step_time import estimate_time
from weft.plan.time.transfers import OVERLAP
from weft.plan.view import views_of

LLAMA_8B = 8_030_261_248
SHARD = LLAMA_8B // 8
SHARDED: dict[str, Any] = {"dp_shard": 8, "zero": 3}
H200 = request_of("llama-3-8b", "1xH200", global_batch=8)
EIGHT = request_of("llama-3-8b", "8xH200", global_batch=64)
BIG = request_of("llama-3-70b", "8xH200", global_batch=8)


def on_host(request: Request, **cluster: Any) -> Request:
    """The request on a host with these figures."""
    return replace(request, cluster=replace(request.cluster, **cluster))


# The host of one H200 that was measured: 16 cores, 55 GB/s to the device.
MEASURED = on_host(H200, host_cores_per_device=16.0)


def found(request: Request, **plan: Any) -> Estimate:
    return estimate(request, plan_with(preset="bf16", **plan))


def memory(request: Request, **plan: Any) -> MemoryEstimate:
    return estimate_memory(views_of(request, columns_with(plan)))


def seconds(request: Request, **plan: Any) -> dict[StepTerm, float]:
    return {term: one(values) for term, values in estimate_time(views_of(request, columns_with(plan))).terms.items()}


def terms(request: Request, **plan: Any) -> dict[MemoryTerm, float]:
    return {term: one(values) for term, values in memory(request, **plan).terms.items()}


# Memory of the device


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_gradients_of_an_offloaded_optimizer_stay_on_the_device(home: str) -> None:
    """With nvme they were counted nowhere: off the device, and not on the host."""
    request = request_of(global_batch=16, sequence_length=16)
    plain, away = (terms(request, microbatches=2, **SHARDED, **keys) for keys in ({}, {"optimizer": home}))
    assert away[MemoryTerm.GRADIENTS] == plain[MemoryTerm.GRADIENTS] == SHARD * 4


@pytest.mark.parametrize(("home", "per_element"), [("none", 4), ("cpu", 4), ("nvme", 2)])
def test_weights_rest_in_the_compute_dtype_where_masters_are_away(home: str, per_element: int) -> None:
    """With moments on the host the weights on the device are the masters; no master is counted twice."""
    assert terms(EIGHT, **SHARDED, optimizer=home)[MemoryTerm.WEIGHTS] == SHARD * per_element


def test_without_a_master_only_moments_leave() -> None:
    request = request_of(global_batch=8, sequence_length=64, preset="fp32")
    assert terms(request, **SHARDED, optimizer="cpu", update="device")[MemoryTerm.WEIGHTS] == SHARD * 4
    assert one(memory(request, **SHARDED, optimizer="cpu", update="device").host) == LLAMA_8B * 8


def test_replicas_with_weights_in_the_compute_dtype_hold_no_cast() -> None:
    request = request_of(global_batch=16, sequence_length=1)
    assert terms(request, dp_replicate=8, microbatches=2)[MemoryTerm.GATHERED] > 0
    assert terms(request, dp_replicate=8, microbatches=2, optimizer="nvme")[MemoryTerm.GATHERED] == 0


@pytest.mark.parametrize(
    ("home", "update", "per_element"), [("cpu", "device", 8), ("cpu", "host", 0), ("nvme", "device", 12)]
)
def test_chunks_are_on_the_device_during_an_update(home: str, update: str, per_element: int) -> None:
    """States of three chunks, and masters that left the device; a small shard has less than that."""
    assert terms(EIGHT, **SHARDED, optimizer=home, update=update)[MemoryTerm.OPTIMIZER_STATE] == 0
    staged = one(staged_states(view_with(EIGHT, **SHARDED, optimizer=home, update=update)))
    assert staged == SLOTS * CHUNK_ELEMENTS * per_element
    small = request_of(tiny_llama(), "1xH200", global_batch=8, sequence_length=16)
    few = one(staged_states(view_with(small, optimizer=home, update=update)))
    assert few == small.shape.num_parameters * per_element


def test_a_delayed_update_keeps_the_gradients_of_two_steps_where_it_runs() -> None:
    plans = {
        (update, delayed): memory(EIGHT, **SHARDED, optimizer="cpu", update=update, delayed=delayed)
        for update in ("device", "host")
        for delayed in (False, True)
    }
    more = {
        update: one(plans[update, True].terms[MemoryTerm.GRADIENTS] - plans[update, False].terms[MemoryTerm.GRADIENTS])
        for update in ("device", "host")
    }
    assert more == {"device": SHARD * 4, "host": 0}
    passing = SLOTS * CHUNK_ELEMENTS * 4 * 8  # gradients no longer pass through staging
    assert one(plans["host", True].host - plans["host", False].host) == LLAMA_8B * 4 - passing
    assert one(plans["device", True].host - plans["device", False].host) == 0
    buffers = {
        update: one(
            plans[update, True].terms[MemoryTerm.COMM_BUFFERS] - plans[update, False].terms[MemoryTerm.COMM_BUFFERS]
        )
        for update in ("device", "host")
    }
    assert buffers == {"device": CHUNK_ELEMENTS * (SLOTS * 8 + 4), "host": 0}  # moments of three chunks, new weights


def test_weights_on_the_host_leave_units_in_use_and_staged_shards() -> None:
    request = request_of(global_batch=64, sequence_length=16)
    plain, away = (terms(request, microbatches=8, **SHARDED, **keys) for keys in ({}, {"parameters": "cpu"}))
    root = 2 * request.shape.vocab_size * request.shape.hidden_size  # on its way at the loss, which is the peak
    assert away[MemoryTerm.WEIGHTS] == 0
    assert away[MemoryTerm.GATHERED] == plain[MemoryTerm.GATHERED]
    more = away[MemoryTerm.COMM_BUFFERS] - plain[MemoryTerm.COMM_BUFFERS]
    assert more == pytest.approx(root / 8 * 4, rel=1e-4)  # as they rest: float32, since the optimizer is on the device


def test_one_device_streams_units_of_weights_on_the_host() -> None:
    """Two blocks and the root are there at a time; the block in use was counted nowhere."""
    shape = tiny_llama(hidden_size=1024, intermediate_size=4096)
    peak = memory(request_of(shape, "1xH200", sequence_length=1024), parameters="cpu", optimizer="cpu")
    assert peak.instant[int(one(peak.at))] == "backward of the last block"
    assert one(peak.terms[MemoryTerm.WEIGHTS]) == 0
    root = 2 * 512 * 1024 + 1024
    assert one(peak.terms[MemoryTerm.GATHERED]) == 2 * (root + 2 * shape.kinds[0].num_parameters)


# Activations

INPUT = 4096 * 4096 * 2  # of one block of 8B: 4,096 tokens in bfloat16


def test_two_inputs_of_recomputed_blocks_stay_on_the_device() -> None:
    plain, away = (
        memory(EIGHT, **SHARDED, microbatches=8, policy="full", offload_activations=where) for where in ("none", "cpu")
    )
    saved = one(plain.terms[MemoryTerm.ACTIVATIONS] - away.terms[MemoryTerm.ACTIVATIONS])
    done = {"loss": 0, "backward of the last block but one": 1}[plain.instant[int(one(plain.at))]]
    assert saved == (32 - done - 2) * INPUT
    assert one(away.host) == 8 * 32 * INPUT
    assert one(plain.host) == 0


def test_inputs_of_a_mixture_leave_and_other_blocks_stay() -> None:
    keys: dict[str, Any] = {**SHARDED, "microbatches": 8, "policy": "budget", "mixture": [10, 0]}
    away = memory(EIGHT, **keys, offload_activations="cpu")
    assert one(away.host) == 8 * 10 * INPUT
    assert terms(EIGHT, **keys)[MemoryTerm.ACTIVATIONS] - one(away.terms[MemoryTerm.ACTIVATIONS]) == 8 * INPUT


def test_tensor_ranks_keep_their_share_of_an_input() -> None:
    keys: dict[str, Any] = {"tp": 8, "microbatches": 64, "policy": "full", "sequence_parallel": False}
    plain, shared = (memory(EIGHT, **keys, partition=is_shared) for is_shared in (False, True))
    assert one(plain.terms[MemoryTerm.ACTIVATIONS] - shared.terms[MemoryTerm.ACTIVATIONS]) >= 24 * INPUT * 7 / 8
    both = memory(EIGHT, **keys, partition=True, offload_activations="cpu")
    assert one(both.host) == 8 * 32 * INPUT / 8


def test_a_partitioned_input_is_gathered_once_per_block_and_backward() -> None:
    keys: dict[str, Any] = {"tp": 8, "microbatches": 64, "policy": "full", "sequence_parallel": False}
    rows = [
        {(row["collective"], row["phase"]): row for row in found(EIGHT, **keys, partition=is_shared).traffic}
        for is_shared in (False, True)
    ]
    assert ("all_gather", "backward") not in rows[0]
    gathers = rows[1]["all_gather", "backward"]
    assert (gathers["bytes"], gathers["count"]) == (64 * 32 * INPUT * 7 // 8, 64 * 32)


def test_inputs_that_a_block_cannot_hide_cost_time() -> None:
    """Offloaded activations cost none: their seconds were in no term."""
    keys: dict[str, Any] = {**SHARDED, "policy": "full", "microbatches": 8, "offload_activations": "cpu"}
    assert seconds(EIGHT, **keys)[StepTerm.OFFLOAD_COPIES] == 0  # 33 MB at 55 GB/s behind a block's forward
    slow = on_host(EIGHT, host=replace(EIGHT.cluster.host, bytes_per_s=1e9))
    busy = block_seconds(view_with(slow, **keys))
    copied = 32 * INPUT / 1e9
    forward = copied - OVERLAP * one(busy.forward - busy.head_forward)
    backward = copied - OVERLAP * one(busy.backward - 2 * busy.head_forward)
    assert forward > backward > 0
    assert seconds(slow, **keys)[StepTerm.OFFLOAD_COPIES] == pytest.approx(8 * (forward + backward))


# Saved tensors of blocks that are not recomputed


def test_blocks_leave_as_far_as_the_link_hides_them() -> None:
    """As many as are exposed by nothing; with one more the link is the slowest."""
    keys: dict[str, Any] = {"microbatches": 8, "offload_activations": "cpu"}
    number = choose_blocks(H200, plan_with(preset="bf16", **keys, offload_blocks="auto"))
    assert 0 < number < 32
    copies = [seconds(H200, **keys, offload_blocks=count)[StepTerm.OFFLOAD_COPIES] for count in (number, number + 1)]
    assert copies[0] == 0
    assert copies[1] > 0
    slow = on_host(H200, host=replace(H200.cluster.host, bytes_per_s=1e8))
    assert choose_blocks(slow, plan_with(preset="bf16", **keys)) == 0
    fast = on_host(H200, host=replace(H200.cluster.host, bytes_per_s=1e13))
    assert choose_blocks(fast, plan_with(preset="bf16", **keys)) == 32


def test_blocks_that_leave_are_on_the_host() -> None:
    keys: dict[str, Any] = {"microbatches": 8, "offload_activations": "cpu"}
    plain, away = (memory(H200, microbatches=8), memory(H200, **keys, offload_blocks=8))
    saved = one(plain.terms[MemoryTerm.ACTIVATIONS] - away.terms[MemoryTerm.ACTIVATIONS])
    assert one(away.host) / 8 * 7 == pytest.approx(saved)  # of eight blocks the last one stays
    assert seconds(H200, **keys, offload_blocks=8)[StepTerm.RECOMPUTE] == 0


@pytest.mark.parametrize(
    "keys",
    [
        {"offload_blocks": 33, "offload_activations": "cpu"},
        {"offload_blocks": 1},
        {"offload_blocks": 1, "offload_activations": "cpu", "policy": "full"},
        {"offload_blocks": 3, "offload_activations": "cpu", "policy": "budget", "mixture": [29, 1]},
    ],
)
def test_blocks_that_do_not_exist_or_are_recomputed_cannot_leave(keys: dict[str, Any]) -> None:
    reasons = [sentence for sentence, _ in check_plan(H200, columns_with({"microbatches": 8, **keys}))]
    assert any("activations.offload_blocks" in sentence for sentence in reasons)


# Time of weights and states


def test_weights_on_the_host_copy_the_shard_not_the_model() -> None:
    """70B on 8 H200 was charged 5.1 s, that of all weights: a rank copies its shard in, for forward and backward."""
    copies = {
        row["phase"]: row
        for row in found(BIG, **SHARDED, policy="full", parameters="cpu", optimizer="cpu").offload.transfers
    }
    shard = views_of(BIG, columns_with(SHARDED))[0].share.total.shard
    assert copies["forward"]["in_bytes"] == copies["backward"]["in_bytes"] == one(shard) * 2
    assert copies["forward"]["seconds"] + copies["backward"]["seconds"] == pytest.approx(0.64, rel=0.01)
    exposed = copies["forward"]["exposed_s"] + copies["backward"]["exposed_s"]
    assert exposed == pytest.approx(2 * one(shard) * 2 / 81 / BIG.cluster.host.bytes_per_s)  # of each, the first unit


@pytest.mark.parametrize(("zero", "copies"), [(3, 2 * 4), (2, 1), (1, 1)])
def test_weights_are_copied_before_every_gather(zero: int, copies: int) -> None:
    rows = found(EIGHT, dp_shard=8, zero=zero, microbatches=4, parameters="cpu", optimizer="cpu").offload.transfers
    weights = sum(row["in_bytes"] for row in rows if row["phase"] != "update")
    assert weights == copies * SHARD * 2


def test_link_disk_and_host_work_at_once() -> None:
    """Their seconds were added: a pipeline costs the slowest, and the first chunk."""
    slow_link = on_host(EIGHT, host=replace(EIGHT.cluster.host, bytes_per_s=1e8, duplex_share=1.0))
    assert seconds(slow_link, **SHARDED, optimizer="nvme", update="device")[StepTerm.OFFLOAD] == pytest.approx(
        12 * SHARD / 1e8 / DEVICE_PIPELINE, rel=0.03
    )
    slow_disk = on_host(EIGHT, nvme_bytes_per_s=8e8)
    assert seconds(slow_disk, **SHARDED, optimizer="nvme", update="device")[StepTerm.OFFLOAD] == pytest.approx(
        24 * SHARD / 1e8, rel=0.03
    )


@given(
    link=st.floats(1e8, 1e12),
    disk=st.floats(1e8, 1e12),
    memory_rate=st.floats(1e9, 1e13),
    cores=st.floats(1, 128),
    is_host=st.booleans(),
    home=st.sampled_from(["cpu", "nvme"]),
)
@settings(max_examples=60)
def test_an_update_takes_as_long_as_its_slowest_stage(
    link: float, disk: float, memory_rate: float, cores: float, is_host: bool, home: str
) -> None:
    """At least each stage alone, at most their sum and the first chunk; a faster machine is never slower."""
    host = replace(EIGHT.cluster.host, bytes_per_s=link)
    request = on_host(
        EIGHT, host=host, nvme_bytes_per_s=disk, host_memory_bytes_per_s=memory_rate, host_cores_per_device=cores
    )
    view = view_with(request, **SHARDED, optimizer=home)
    taken = one(update_seconds(view, on_host=is_host))
    stages = [
        {("cpu", False): 8, ("cpu", True): 8, ("nvme", False): 12, ("nvme", True): 4}[home, is_host] * SHARD / link,
        *([24 * SHARD * 8 / disk] if home == "nvme" else []),
        *([SHARD / host_update_rate(view)] if is_host else []),
    ]
    assert taken >= max(stages) * (1 - 1e-9)
    fast = {
        "nvme_bytes_per_s": 2 * disk,
        "host_memory_bytes_per_s": 2 * memory_rate,
        "host_cores_per_device": 2 * cores,
    }
    faster = on_host(request, host=replace(host, bytes_per_s=2 * link), **fast)
    assert one(update_seconds(view_with(faster, **SHARDED, optimizer=home), on_host=is_host)) <= taken


def test_the_host_updates_as_fast_as_was_measured() -> None:
    """Host speed was a guess: four links. Measured with torch's AdamW: 0.78 G parameters/s on one core, 5.6 on 16."""
    rates = [
        host_update_rate(view_with(on_host(H200, host_cores_per_device=cores), optimizer="cpu")) / HOST_PIPELINE
        for cores in (1.0, 16.0)
    ]
    assert rates == pytest.approx([0.78e9, 5.6e9], rel=0.01)
    view = view_with(MEASURED, optimizer="cpu")
    assert LLAMA_8B / one(update_seconds(view, on_host=True)) == pytest.approx(2.95e9, rel=0.03)


def test_streamed_moments_are_as_fast_as_was_measured() -> None:
    """6.0 G parameters/s for 8 bytes each way."""
    request = replace(MEASURED, precision=request_of(preset="fp32").precision)
    view = view_with(request, optimizer="cpu", preset="fp32")
    assert LLAMA_8B / one(update_seconds(view, on_host=False)) == pytest.approx(6.0e9, rel=0.03)


def test_all_ranks_of_a_node_share_disk_and_host_memory() -> None:
    alone, together = (request_of("llama-3-8b", devices, global_batch=64) for devices in ("1xH200", "8xH200"))
    keys: dict[str, Any] = {"optimizer": "nvme", "update": "device"}
    one_rank = seconds(alone, **keys)[StepTerm.OFFLOAD]
    assert seconds(together, dp_replicate=8, **keys)[StepTerm.OFFLOAD] == pytest.approx(8 * one_rank, rel=0.01)


def landing(request: Request, update: str) -> float:
    return SHARD * one(landing_seconds(view_with(request, **SHARDED, optimizer="cpu", update=update)))


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_delayed_update_hides_behind_the_next_step(update: str) -> None:
    keys: dict[str, Any] = {**SHARDED, "optimizer": "cpu", "update": update}
    now, late = (seconds(EIGHT, **keys, delayed=delayed) for delayed in (False, True))
    assert now[StepTerm.OFFLOAD] > 0
    assert late[StepTerm.OFFLOAD] == pytest.approx(landing(EIGHT, update))  # the rest is hidden
    slow = on_host(EIGHT, host=replace(EIGHT.cluster.host, bytes_per_s=1e8))
    now, late = (seconds(slow, **keys, delayed=delayed) for delayed in (False, True))
    busy = block_seconds(view_with(slow, **SHARDED))
    hidden = now[StepTerm.OFFLOAD] - late[StepTerm.OFFLOAD] + landing(slow, update)
    assert hidden == pytest.approx(OVERLAP * one(busy.forward + busy.backward))


def test_new_weights_land_through_the_link_only_from_a_host() -> None:
    link = EIGHT.cluster.host
    assert landing(EIGHT, "host") == pytest.approx(SHARD * 4 / (link.bytes_per_s * link.duplex_share))
    assert landing(EIGHT, "device") < landing(EIGHT, "host") / 20


# Where the update runs


def test_the_faster_place_updates() -> None:
    """Moments alone are 8 bytes each way, gradients and weights 8 and 4: the device. With masters in files a slow link
    leaves the update to the host."""
    plan, in_files = (plan_with(preset="bf16", optimizer=home) for home in ("cpu", "nvme"))
    slow = on_host(MEASURED, host=replace(MEASURED.cluster.host, bytes_per_s=1e10), nvme_bytes_per_s=1e12)
    assert [choose_update(machine, plan) for machine in (MEASURED, slow)] == ["device", "device"]
    assert choose_update(slow, in_files) == "host"
    assert choose_update(slow, plan_with(preset="bf16", optimizer="nvme", update="device")) == "device"
    assert choose_update(request_of(devices="1xCPU"), plan) == "host"


@pytest.mark.parametrize("link", [1e9, 1e10, 5e10, 1e12])
def test_auto_costs_the_lesser_of_the_two_places(link: float) -> None:
    request = on_host(EIGHT, host=replace(EIGHT.cluster.host, bytes_per_s=link))
    taken = {
        update: seconds(request, **SHARDED, optimizer="cpu", update=update)[StepTerm.OFFLOAD]
        for update in ("auto", "device", "host")
    }
    assert min(taken["device"], taken["host"]) <= taken["auto"] <= min(taken["device"], taken["host"]) / 0.95


# Host memory and disk


def test_states_weights_and_inputs_fill_the_host_of_all_ranks() -> None:
    """8B on 8 devices, once per node: 8 bytes per parameter of moments; with weights on the host masters and 2 more."""
    request = request_of(global_batch=8, sequence_length=64)
    assert one(memory(request, **SHARDED).host) == 0
    assert one(memory(request, **SHARDED, optimizer="cpu", update="device").host) == 8 * LLAMA_8B
    both = memory(request, **SHARDED, optimizer="cpu", update="device", parameters="cpu")
    assert one(both.host) == 14 * LLAMA_8B
    assert one(memory(request, dp_replicate=8, optimizer="cpu", update="device").host) == 8 * 8 * LLAMA_8B


def test_files_leave_three_chunks_in_host_memory() -> None:
    record = found(EIGHT, **SHARDED, optimizer="nvme", update="device").offload
    assert record.host_terms == {"staging": SLOTS * CHUNK_ELEMENTS * 12}
    assert record.disk_terms == {"masters": SHARD * 4, "moments": SHARD * 8}
    durable = found(EIGHT, **SHARDED, optimizer="nvme", durable="step").offload
    assert durable.disk_terms == {"masters": 2 * SHARD * 4, "moments": 2 * SHARD * 8}
    assert durable.file_bytes == record.file_bytes == SHARD * 12


def test_json_has_host_disk_and_copies() -> None:
    """It had no byte of the host."""
    answer: dict[str, Any] = found(EIGHT, **SHARDED, optimizer="nvme", update="device").as_dict()
    staged = SLOTS * CHUNK_ELEMENTS * 12
    assert answer["host"] == {"bytes_per_rank": staged, "bytes_per_node": 8 * staged, "terms": {"staging": staged}}
    disk = answer["disk"]
    assert (disk["bytes_per_rank"], disk["bytes_per_node"]) == (SHARD * 12, LLAMA_8B * 12)
    assert disk["written_bytes_per_step"] == disk["read_bytes_per_step"] == LLAMA_8B * 12
    per_day = LLAMA_8B * 12 * DAY_S / answer["time"]["step_s"]
    assert disk["written_bytes_per_day"] == pytest.approx(per_day)
    assert [row["phase"] for row in answer["transfers"]] == ["update"]
    assert answer["update"] == "device"
    plain: dict[str, Any] = found(EIGHT, **SHARDED).as_dict()
    assert plain["host"] == {"bytes_per_rank": 0, "bytes_per_node": 0, "terms": {}}
    assert plain["transfers"] == []
    assert "update" not in plain


def test_a_pipeline_s_fullest_rank_counts_on_the_host() -> None:
    """The last stage has the head: more states than the first here, whose blocks are fewer."""
    keys: dict[str, Any] = {"pp": 8, "microbatches": 64, "optimizer": "cpu", "update": "device"}
    views = views_of(EIGHT, columns_with({**keys, "blocks": [1, 1, 1, 1, 1, 1, 1, 25]}))
    most = max(one(view.share.total.unsharded) for view in views)
    assert one(estimate_memory(views).host) == 8 * 8 * most
    assert most > one(views[0].share.total.unsharded)


def test_a_host_that_does_not_hold_all_ranks_does_not_fit() -> None:
    roomy = on_host(EIGHT, host_memory_bytes=round(8 * 12 * LLAMA_8B / 0.9) + 1)
    tight = on_host(EIGHT, host_memory_bytes=round(4 * 12 * LLAMA_8B / 0.9))
    keys: dict[str, Any] = {
        "dp_replicate": 8,
        "optimizer": "cpu",
        "update": "device",
        "policy": "full",
        "microbatches": 8,
    }
    assert one(fitting(roomy, memory(roomy, **keys))) == 1
    assert one(fitting(tight, memory(tight, **keys))) == 0


# All plans


@given(request=requests(), home=st.sampled_from(["cpu", "nvme"]), is_away=st.booleans(), is_late=st.booleans())
@settings(max_examples=15)
def test_offload_never_needs_more_than_it_takes_away(request: Request, home: str, is_away: bool, is_late: bool) -> None:
    """Of every legal plan: terms are finite, states leave the device, and no plan without offload has host bytes."""
    columns = legal_plans(request)
    if not len(columns):
        return
    columns = columns.take(np.arange(0, len(columns), max(1, len(columns) // 50)))
    away = replace(
        columns,
        offload_optimizer=np.full(len(columns), 1 + (home == "nvme"), dtype=np.int64),
        offload_parameters=np.full(len(columns), int(is_away), dtype=np.int64),
        delayed_update=np.full(len(columns), int(is_late), dtype=np.int64),
    )
    plain, moved = (estimate_memory(views_of(request, one)) for one in (columns, away))
    assert not np.any(plain.host)
    assert not np.any(plain.offloaded.disk_per_rank)
    for values in (*moved.terms.values(), *moved.offloaded.host.values(), *moved.offloaded.disk.values()):
        assert np.isfinite(values).all()
        assert (values >= 0).all()
    staged = SLOTS * CHUNK_ELEMENTS * 12
    assert (moved.terms[MemoryTerm.OPTIMIZER_STATE] <= staged).all()
    assert (moved.terms[MemoryTerm.WEIGHTS] <= plain.terms[MemoryTerm.WEIGHTS]).all()
    taken = estimate_time(views_of(request, away))
    assert np.isfinite(taken.total).all()
    assert (taken.terms[StepTerm.OFFLOAD_COPIES] >= 0).all()
    assert (taken.terms[StepTerm.OFFLOAD] >= 0).all()


@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": "cpu"},
        {"optimizer": "cpu", "update": "host", "parameters": "cpu"},
        {"optimizer": "nvme", "policy": "full", "offload_activations": "cpu"},
    ],
)
@pytest.mark.parametrize("layout", [{"dp_replicate": 8}, {"dp_shard": 8, "zero": 2}, SHARDED])
def test_the_arithmetic_of_an_offloaded_plan_adds_up(keys: dict[str, Any], layout: dict[str, Any]) -> None:
    estimated, lines = explain_memory(EIGHT, plan_with(preset="bf16", **layout, **keys))
    for term, size in estimated.memory_terms.items():
        if term != "weight_versions" or size:
            assert sum(line.bytes for line in lines if line.term == term) == pytest.approx(size, abs=2)


def test_offloaded_activations_are_searched_with_full_recompute_only() -> None:
    columns = legal_plans(EIGHT, Freedom(fixed={"activations.offload": "cpu"}))
    assert columns.recomputes("full").all()


# Staging of states


STAGED: dict[str, Any] = {"optimizer": "cpu", "update": "device", "microbatches": 8}
CHUNK_BYTES = CHUNK_ELEMENTS * 8


def test_staged_chunks_are_on_the_device_while_activations_are() -> None:
    """Seven of eight micro-batches are done when the last one peaks: 7/8 of the staging, in whole chunks."""
    plain, staged = (terms(H200, **STAGED, staging_bytes=size) for size in (0, 10 * CHUNK_BYTES))
    more = {term: staged[term] - plain[term] for term in plain if staged[term] != plain[term]}
    assert more[MemoryTerm.TEMPORARIES] == 8 * CHUNK_BYTES
    assert set(more) <= {MemoryTerm.TEMPORARIES, MemoryTerm.FRAMEWORK}
    on_host = terms(H200, **{**STAGED, "update": "host"}, staging_bytes=10 * CHUNK_BYTES)
    assert on_host == terms(H200, **{**STAGED, "update": "host"})


def test_staging_hides_copies_behind_several_micro_batches() -> None:
    sizes = [0, 4 * CHUNK_BYTES, 2**35, 2**40]
    exposed = [seconds(H200, **STAGED, staging_bytes=size)[StepTerm.OFFLOAD] for size in sizes]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[0] > exposed[1] > exposed[2]
    row = found(H200, **STAGED, staging_bytes=2**40).offload.transfers[-1]
    assert row["seconds"] == found(H200, **STAGED).offload.transfers[-1]["seconds"]
    device = H200.cluster.device
    update_s = UPDATE_PASSES * 28 * LLAMA_8B / (device.memory_bytes_per_s * device.memory_share)
    assert row["exposed_s"] >= update_s  # the update itself hides behind nothing


def test_the_search_stages_what_is_free() -> None:
    fixed = {"offload.optimizer": "cpu", "offload.update": "device", "pipeline.microbatches": 8}
    best = search(H200, freedom=Freedom(fixed=fixed), top=1).plans[0]
    assert best.fits
    staged = best.plan.offload.staging_bytes
    assert staged > 0
    assert staged % CHUNK_BYTES == 0
    kept = search(H200, freedom=Freedom(fixed={**fixed, "offload.staging_bytes": 0}), top=1).plans[0]
    assert kept.plan.offload.staging_bytes == 0
    assert kept.step_s > best.step_s
    one_batch = search(H200, freedom=Freedom(fixed={**fixed, "pipeline.microbatches": 1}), top=1).plans[0]
    assert one_batch.plan.offload.staging_bytes == 0
