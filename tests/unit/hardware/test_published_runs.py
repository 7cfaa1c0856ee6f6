"""The table of published runs is whole and agrees with itself: the planner is judged against what was printed."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from published_runs import PublishedRun, published_runs

from weft.hardware import cluster

RUNS = published_runs()
DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
each_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
each_with_rate = pytest.mark.parametrize("run", [run for run in RUNS if run.tflops_per_device], ids=lambda run: run.id)
each_with_tokens = pytest.mark.parametrize(
    "run", [run for run in RUNS if run.tokens_per_s_per_device], ids=lambda run: run.id
)


def test_there_are_enough_runs_of_enough_kinds() -> None:
    assert len(RUNS) >= 16
    assert len({run.id for run in RUNS}) == len(RUNS)
    assert {run.recompute for run in RUNS} == {"none", "selective", "full"}
    assert {run.zero for run in RUNS} == {0, 1, 2, 3}
    assert sum(run.peak_memory_gib is not None for run in RUNS) >= 16
    assert any(run.ep > 1 for run in RUNS)
    assert any(run.cp > 1 for run in RUNS)


@each_run
def test_the_layout_fills_the_devices_and_divides_the_batch(run: PublishedRun) -> None:
    assert cluster(run.devices).num_devices == run.num_devices
    assert run.global_batch == run.dp * run.micro_batch * run.microbatches
    assert run.dp * run.cp * run.tp % run.ep == 0
    assert run.dp % (run.dp_shard or 1) == 0
    assert bool(run.schedule) == (run.pp > 1)
    assert run.schedule != "interleaved_1f1b" or run.microbatches % run.pp == 0


@each_run
def test_a_run_says_where_it_comes_from_and_what_was_measured(run: PublishedRun) -> None:
    assert run.source
    assert re.fullmatch(r"20\d\d-\d\d", run.date)
    assert bool(run.model) != bool(run.type)
    assert run.step_s is not None or run.tflops_per_device is not None
    assert set(run.assumed) <= {field.name for field in fields(PublishedRun)}
    assert run.flops in ("", "hardware-sc21", "model", "model-causal", "unstated")
    assert bool(run.memory) == (run.peak_memory_gib is not None)
    assert run.memory in ("", "reserved", "allocated", "device")


@each_with_tokens
def test_step_time_and_throughput_are_one_figure(run: PublishedRun) -> None:
    assert run.step_s is not None
    tokens = run.global_batch * run.sequence_length
    assert tokens / run.step_s / run.num_devices == pytest.approx(run.tokens_per_s_per_device, rel=0.005)


@each_run
def test_memory_fits_the_device(run: PublishedRun) -> None:
    if run.peak_memory_gib is not None:
        assert run.peak_memory_gib * 2**30 < cluster(run.devices).device.memory_bytes


@each_with_rate
def test_rates_are_below_what_the_catalogue_says_products_reach(run: PublishedRun) -> None:
    """A run that beats the best matrix product shows a wrong figure, a wrong count or a wrong catalogue entry."""
    assert run.tflops_per_device is not None
    device = cluster(run.devices).device
    dtype = DTYPE[run.precision]
    assert run.tflops_per_device * 1e12 < device.peak_flops[dtype] * device.rates[dtype].best


def _hardware_flops_sc21(run: PublishedRun, *, hidden: int, layers: int, vocab: int) -> float:
    tokens = run.global_batch * run.sequence_length
    inner = 1 + run.sequence_length / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * tokens * layers * hidden**2 * inner


@pytest.mark.parametrize(
    ("run_id", "hidden", "layers", "vocab"),
    [
        ("megatron-sc21-1.7b", 2304, 24, 51_200),
        ("megatron-sc21-1008b", 25_600, 128, 51_200),
        ("zero3-sc21-175b-1536", 12_288, 96, 51_200),
        ("bloom-176b", 14_336, 70, 250_880),
        ("bloom-181b-pp6-mbs4", 14_336, 72, 250_880),
    ],
)
def test_rate_and_step_time_agree_by_the_stated_count(run_id: str, hidden: int, layers: int, vocab: int) -> None:
    run = next(run for run in RUNS if run.id == run_id)
    assert run.flops == "hardware-sc21"
    assert run.step_s is not None
    assert run.tflops_per_device is not None
    rate = _hardware_flops_sc21(run, hidden=hidden, layers=layers, vocab=vocab) / run.step_s / run.num_devices
    assert rate / 1e12 == pytest.approx(run.tflops_per_device, rel=0.02)
