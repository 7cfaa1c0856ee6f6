"""The question: bytes of each number, and when attention scores go through memory."""

from dataclasses import replace

import pytest
from plan_cases import request_of

from weft import hardware, zoo
from weft.core.model_shape import AttentionShape
from weft.plan.request import Workload, byte_sizes, optimizer_bytes


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
    assert optimizer_bytes(Workload(global_batch=1, sequence_length=1), state_bytes=2) == 4


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
