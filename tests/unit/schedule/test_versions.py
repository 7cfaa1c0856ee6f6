"""Weight versions: what PipeDream stashes, what 2BW buffers, and the delays both papers state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.schedule import (
    WeightRule,
    check_schedule,
    generate,
    staleness,
    versions_read,
    weight_versions,
)


@given(p=st.integers(1, 8), m=st.integers(1, 12))
def test_pipedream_keeps_p_minus_s_versions(p: int, m: int) -> None:
    schedule = generate("pipedream", num_ranks=p, num_microbatches=m)
    assert weight_versions(schedule) == tuple(p - s for s in range(p))
    assert staleness(schedule) == tuple(p - 1 - s for s in range(p))


def test_pipedream_reads_the_newest_weights_at_its_forward() -> None:
    """Stage 0 of 3 has two micro-batches ahead when its first update comes, the last stage none."""
    schedule = generate("pipedream", num_ranks=3, num_microbatches=6, num_steps=1)
    assert versions_read(schedule) == [[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


@given(p=st.integers(1, 8))
def test_vertical_sync_reads_one_version_on_all_stages_and_keeps_p(p: int) -> None:
    schedule = generate("pipedream", num_ranks=p, num_microbatches=4 * p, num_steps=1)
    synced = replace(schedule, weight_rule=WeightRule.VERTICAL_SYNC)
    assert check_schedule(synced) == []
    assert all(versions == versions_read(schedule)[0] for versions in versions_read(synced))
    assert staleness(synced) == (p - 1,) * p
    assert weight_versions(synced) == (p,) * p


@given(p=st.integers(1, 8), more=st.integers(0, 8), steps=st.integers(2, 5))
def test_2bw_keeps_two_versions_and_is_one_step_behind(p: int, more: int, steps: int) -> None:
    schedule = generate("pipedream_2bw", num_ranks=p, num_microbatches=p + more, num_steps=steps)
    assert weight_versions(schedule) == (2,) * p
    assert staleness(schedule) == (1,) * p
    for versions in versions_read(schedule):
        assert versions == [max(0, microbatch // (p + more) - 1) for microbatch in range(schedule.window)]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zero_bubble"])
def test_a_flush_keeps_one_version_and_nothing_is_stale(name: str) -> None:
    schedule = generate(name, num_ranks=3, num_microbatches=4)
    assert weight_versions(schedule) == (1, 1, 1)
    assert staleness(schedule) == (0, 0, 0)
    assert versions_read(schedule) == [[0] * 4] * 3
