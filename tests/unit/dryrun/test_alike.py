"""Two short steps stand for a long one: what is cut, what is extended, and when it is not done."""

from __future__ import annotations

from dataclasses import replace

from dry_run_cases import found_of

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.alike import are_alike, extended, shortened, stands_for


def plan_of(microbatches: int, **mesh: int) -> Plan:
    return Plan.from_tables({"mesh": mesh, "pipeline": {"microbatches": microbatches}})


def run_of(global_batch: int) -> RunSpec:
    return RunSpec.from_tables({"model": {"type": "llama"}, "train": {"global_batch": global_batch}})


def test_rows_of_a_microbatch_stay() -> None:
    run, plan = shortened(run_of(96), plan_of(6, dp_replicate=4), microbatches=2)
    assert plan.pipeline.microbatches == 2
    assert run.train.global_batch == 96 // 6 * 2


def test_only_many_microbatches_without_a_pipeline_are_cut() -> None:
    assert are_alike(run_of(32), plan_of(4, dp_replicate=8))
    assert not are_alike(run_of(24), plan_of(3, dp_replicate=8))
    assert not are_alike(run_of(33), plan_of(4, dp_replicate=8))  # the dry run itself refuses it
    assert not are_alike(run_of(32), plan_of(8, pp=4))


def test_what_grows_goes_on_growing() -> None:
    few = found_of(terms={"weights": 100, "activations": 50}, traffic_bytes=200, count=2, flops=1000)
    more = found_of(terms={"weights": 100, "activations": 53}, traffic_bytes=300, count=3, flops=1500)
    assert stands_for(few, more)
    found = extended(few, more, microbatches=10)
    assert found.peak.terms == {"weights": 100, "activations": 53 + 7 * 3}
    assert found.peak_bytes == sum(found.peak.terms.values())
    assert [(row["bytes"], row["count"]) for row in found.traffic] == [(1000, 10)]
    assert found.flops == 5000
    assert "extrapolated to 10 micro-batches" in found.notes[-1]


def test_another_peak_stands_for_nothing() -> None:
    few = found_of()
    assert not stands_for(few, replace(few, peak=replace(few.peak, operator="aten.mm")))
    assert not stands_for(few, replace(few, traffic=[]))
