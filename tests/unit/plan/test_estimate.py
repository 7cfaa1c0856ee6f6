"""One plan as a record: the names and units that `weft plan --json` promises, and sums that stay sums when rounded."""

import json

import pytest
from plan_cases import plan_with, request_of

from weft.core.terms import MemoryTerm, StepTerm
from weft.plan.estimate import estimate

REQUEST = request_of(devices="2x8xH100-80GB", global_batch=64, sequence_length=4096)
HYBRID = plan_with(dp_shard=2, tp=4, pp=2, zero=1, microbatches=32, preset="bf16")


def test_the_record_has_the_fields_of_the_interface() -> None:
    found = json.loads(json.dumps(estimate(REQUEST, HYBRID).as_dict()))
    assert {"plan", "fits", "memory", "traffic", "time", "mfu", "tokens_per_s"} <= set(found)
    assert found["memory"]["total_bytes"] == sum(found["memory"]["terms"].values())
    assert found["time"]["step_s"] == pytest.approx(sum(found["time"]["terms"].values()))
    assert all({"axis", "collective", "phase", "bytes"} <= set(row) for row in found["traffic"])
    assert found["plan"]["mesh"]["tp"] == 4
    assert found["tokens_per_s"] == pytest.approx(64 * 4096 / found["time"]["step_s"])


def test_terms_carry_the_shared_names() -> None:
    found = estimate(REQUEST, HYBRID)
    assert set(found.memory_terms) <= {str(term) for term in MemoryTerm}
    assert set(found.time_terms) == {str(term) for term in StepTerm}
    assert all(isinstance(value, int) for value in found.memory_terms.values())


def test_traffic_is_of_the_axes_in_use_and_names_their_links() -> None:
    """tp 4 and dp_shard 2 fill a node of 8; the two stages are on two nodes."""
    found = estimate(REQUEST, HYBRID)
    links = {row["axis"]: row["link"] for row in found.traffic}
    inside, between = REQUEST.cluster.inside.name, REQUEST.cluster.between.name
    assert links == {"dp_shard": inside, "tp": inside, "pp": between}
    assert all(int(row["bytes"]) > 0 and int(row["count"]) > 0 for row in found.traffic)


def test_the_peak_says_when_and_on_which_stage() -> None:
    assert estimate(REQUEST, HYBRID).peak_at.endswith("stage")
    alone = estimate(REQUEST, plan_with(dp_shard=16, zero=3, preset="bf16"))
    assert "stage" not in alone.peak_at


def test_a_plan_fits_up_to_the_budget() -> None:
    """70B does not fit on one H100 whatever is recomputed; 1B does."""
    small = request_of("llama-3.2-1b", "1xH100-80GB", global_batch=1, sequence_length=512)
    large = request_of("llama-3-70b", "1xH100-80GB", global_batch=1, sequence_length=512)
    plan = plan_with(policy="full", preset="bf16")
    assert estimate(small, plan).fits
    assert not estimate(large, plan).fits
    assert estimate(large, plan).memory_bytes > 16 * 70e9
