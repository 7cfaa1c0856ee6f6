"""The question: bytes of each number, and when attention scores go through memory."""

from dataclasses import replace

import pytest
from plan_cases import request_of

from weft import hardware, zoo
from weft.core.model_shape import AttentionShape
from weft.core.run_spec import DEFAULT_RUN, RunSpec
from weft.plan.ask import ask
from weft.plan.request import OptimizerKernel, OptimizerKind, Workload, byte_sizes, optimizer_bytes, update_bytes


def attention_of(name: str) -> AttentionShape:
    found = zoo.named(name).kinds[0].attention
    assert found is not None
    return found


@pytest.mark.parametrize(("preset", "compute", "is_mixed"), [("fp32", 4, False), ("bf16", 2, True), ("fp16", 2, True)])
def test_bytes_of_the_presets(preset: str, compute: int, is_mixed: bool) -> None:
    sizes = byte_sizes(request_of(preset=preset))
    assert (sizes.compute, sizes.activation, sizes.is_mixed) == (compute, compute, is_mixed)
    assert (sizes.master, sizes.gradient, sizes.communication, sizes.optimizer) == (4, 4, 4, 8)


def test_low_precision_moments() -> None:
    assert optimizer_bytes(Workload(global_batch=1, sequence_length=1), first=2, second=4) == 6


@pytest.mark.parametrize(
    ("optimizer", "kernel", "expected"),
    [
        ("adamw", "auto", 0),
        ("adamw", "fused", 0),
        ("adamw", "foreach", 2),  # as wide as its moments
        ("adam", "foreach", 4),
        ("sgd", "foreach", 4),  # as wide as the weights it decays
        ("sgd", "auto", 0),
        ("adamw8bit", "foreach", 0),  # a run with foreach, planned with --optimizer adamw8bit
    ],
)
def test_temporaries_of_the_update(optimizer: OptimizerKind, kernel: OptimizerKernel, expected: int) -> None:
    workload = Workload(global_batch=1, sequence_length=1, optimizer=optimizer, optimizer_kernel=kernel)
    assert update_bytes(workload, state_bytes=2, master_bytes=4) == expected


def test_the_kernel_comes_from_run_toml() -> None:
    run = RunSpec.from_tables({**DEFAULT_RUN, "train": {"optimizer_kernel": "foreach"}})
    assert ask(run, "1xH200").request.workload.optimizer_kernel == "foreach"
    assert ask("llama-3-8b", "1xH200").request.workload.optimizer_kernel == "auto"


def test_grouped_queries_in_float32_have_no_fused_kernel_on_a_gpu() -> None:
    """Llama-3's 8 key-value heads: bf16 and CPUs have one, float32 on a GPU has not; GPT-2 is not grouped."""
    grouped = attention_of("llama-3-8b")
    assert request_of(preset="fp32").writes_scores(grouped)
    assert not request_of(preset="bf16").writes_scores(grouped)
    assert not request_of(preset="fp32").writes_scores(attention_of("gpt2"))
    assert not replace(request_of(preset="fp32"), cluster=hardware.cluster("1xCPU")).writes_scores(grouped)


def test_a_soft_cap_is_written_out_unless_a_kernel_has_it() -> None:
    capped = attention_of("gemma-2-9b")
    assert request_of().writes_scores(capped)
    assert not request_of(attention="fused").writes_scores(capped)
    assert request_of(attention="eager").writes_scores(attention_of("llama-3-8b"))


def test_a_step_s_tokens_and_the_memory_a_plan_may_fill() -> None:
    request = request_of(global_batch=8, sequence_length=4096)
    assert request.workload.tokens == 32_768
    assert request.budget_bytes == pytest.approx(0.97 * request.cluster.device.memory_bytes)
