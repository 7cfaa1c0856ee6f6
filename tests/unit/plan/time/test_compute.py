"""Seconds of arithmetic against flops over rates; recomputation, kernels, experts and the FLOPs that MFU counts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan_cases import columns_with, one, request_of, tiny_mixtral, view_with

from weft import hardware
from weft.plan.cp.sizes import WORK
from weft.plan.request import Request
from weft.plan.time.compute import (
    ATTENTION_BACKWARD,
    ATTENTION_SHARE,
    LAUNCH_COMPILED_S,
    LAUNCH_EAGER_S,
    MOVED_COMPILED,
    MOVED_EAGER,
    BlockSeconds,
    block_seconds,
    linear_s,
    model_flops,
)
from weft.plan.view import views_of

REQUEST = request_of(global_batch=8, sequence_length=8192)
DEVICE = REQUEST.cluster.device
PEAK, CURVE = DEVICE.peak_flops["bfloat16"], DEVICE.rates["bfloat16"]
BANDWIDTH = DEVICE.memory_bytes_per_s * DEVICE.memory_share


def seconds(request: Request = REQUEST, **plan: Any) -> BlockSeconds:
    return block_seconds(view_with(request, **{"dp_shard": 8, "zero": 3, **plan}))


def product(rows: float, inner: int, outer: int) -> float:
    return one(linear_s(DEVICE, REQUEST, rows=np.asarray([rows]), inner=inner, outer=outer))


def by_hand(rows: float, inner: int, outer: int) -> float:
    flops = 2.0 * rows * inner * outer
    return (flops + CURVE.half_flops) / (PEAK * CURVE.best)


def test_a_large_product_runs_at_the_best_rate() -> None:
    assert product(65_536, 8192, 28_672) == pytest.approx(2 * 65_536 * 8192 * 28_672 / (PEAK * CURVE.best), rel=1e-3)


def test_a_product_of_half_flops_runs_at_half_the_rate() -> None:
    side = (CURVE.half_flops / 2) ** (1 / 3)
    expected = CURVE.half_flops / (PEAK * CURVE.best / 2)
    assert one(
        linear_s(DEVICE, REQUEST, rows=np.asarray([side]), inner=np.asarray([side]), outer=np.asarray([side]))
    ) == (pytest.approx(expected))


def test_a_product_is_never_faster_than_its_weights_are_read() -> None:
    """One row through a large matrix is a matrix read from memory."""
    assert product(1, 65_536, 65_536) >= 2 * 65_536**2 / BANDWIDTH


def test_the_products_of_llama_3_8b() -> None:
    """32 blocks of 7 linears, forward, one sequence of 8,192."""
    h, kv, f, t = 4096, 1024, 14_336, 8192
    block = 2 * by_hand(t, h, h) + 2 * by_hand(t, h, kv) + 2 * by_hand(t, h, f) + by_hand(t, f, h)
    assert one(seconds().matmul_forward) == pytest.approx(32 * block)
    assert one(seconds().head_forward) == pytest.approx(by_hand(t, h, 128_256))


def test_attention_counts_half_of_the_keys_and_a_backward_of_two_and_a_half() -> None:
    """q·k and p·v: 2 x 2 flops x 4,096.5 keys x 4,096 numbers."""
    flops = 32 * 8192 * 2 * 2 * 4096.5 * 4096
    forward = flops / (PEAK * CURVE.best * ATTENTION_SHARE)
    busy = seconds()
    assert one(busy.attention_forward) == pytest.approx(forward)
    others = 2 * (one(busy.matmul_forward) + one(busy.head_forward)) + 2 * one(busy.pointwise_forward)
    assert one(busy.backward) == pytest.approx(others + ATTENTION_BACKWARD * forward)


def test_written_out_attention_is_slower_than_a_fused_kernel() -> None:
    written = replace(REQUEST, workload=replace(REQUEST.workload, attention="eager"))
    scores = 32 * 8192 * 8192 * 32 * 5 * 4 / BANDWIDTH
    products = 8192 / 4096.5 * one(seconds().attention_forward)  # of all keys
    assert one(seconds(written).attention_forward) == pytest.approx(products + scores)


def test_written_out_attention_skips_no_key_outside_a_window() -> None:
    """Half of gpt-oss's blocks see 128 keys; written out they multiply all 4,096 and mask afterwards."""
    request = request_of("gpt-oss-20b", "1xH100-80GB", global_batch=1, sequence_length=4096)
    shape = request.shape
    windows = [kind.attention.window for kind in shape.kinds if kind.attention is not None]
    assert 128 in windows
    whole = replace(
        shape,
        kinds=tuple(
            replace(kind, attention=kind.attention and replace(kind.attention, window=None)) for kind in shape.kinds
        ),
    )
    found, without = (
        one(seconds(replace(request, shape=each), dp_shard=1, zero=0).attention_forward) for each in (shape, whole)
    )
    assert found == pytest.approx(without)


def test_tensor_parallelism_divides_attention_exactly_and_products_not_quite() -> None:
    """Smaller products run at a lower rate, so eight ranks take more than an eighth of the time."""
    request = replace(REQUEST, workload=replace(REQUEST.workload, global_batch=1))
    whole, cut = seconds(request, dp_shard=1, zero=0), seconds(request, dp_shard=1, zero=0, tp=8)
    assert one(cut.attention_forward) == pytest.approx(one(whole.attention_forward) / 8)
    assert one(whole.matmul_forward) / 8 < one(cut.matmul_forward) < one(whole.matmul_forward) / 4


def test_context_parallelism_divides_the_tokens_and_contiguous_parts_are_uneven() -> None:
    request = replace(REQUEST, workload=replace(REQUEST.workload, global_batch=1))
    whole, cut = seconds(request, dp_shard=1, zero=0), seconds(request, dp_shard=1, zero=0, cp=8)
    assert one(cut.attention_forward) == pytest.approx(one(whole.attention_forward) * WORK["gather"] / 8)


def test_full_recomputation_repeats_the_blocks_and_not_the_head() -> None:
    busy = seconds(policy="full")
    again = one(busy.matmul_forward) + one(busy.attention_forward) + one(busy.pointwise_forward)
    assert one(busy.recompute) == pytest.approx(again)
    assert one(seconds(policy="none").recompute) == 0


def test_selective_recomputation_repeats_pointwise_operators_only() -> None:
    busy = seconds(policy="selective")
    assert 0 < one(busy.recompute) < one(busy.pointwise_forward)


def test_compiled_blocks_move_less() -> None:
    """The bytes autograd keeps of a block (200,840 a token), 12 times or 2.5 times, a third of it forward."""
    eager, compiled = seconds(), seconds(enabled=True)
    assert one(eager.pointwise_forward) == pytest.approx(32 * 8192 * 200_840 * MOVED_EAGER / 3 / BANDWIDTH)
    assert one(compiled.pointwise_forward) == pytest.approx(32 * 8192 * 200_840 * MOVED_COMPILED / 3 / BANDWIDTH)


def test_small_models_wait_for_their_launches() -> None:
    """12 blocks of GPT-2 on one row of 16 tokens take what the host needs to start their operators, three times."""
    request = request_of("gpt2", "1xH100-80GB", global_batch=1, sequence_length=16)
    for enabled, least_s in ((False, LAUNCH_EAGER_S), (True, LAUNCH_COMPILED_S)):
        busy = seconds(request, dp_shard=1, zero=0, enabled=enabled)
        blocks = one(busy.matmul_forward) + one(busy.attention_forward) + one(busy.pointwise_forward)
        assert one(busy.launch) == pytest.approx(3 * (12 * least_s - blocks))
    assert one(seconds().launch) == 0
    on_cpu = request_of("gpt2", "1xCPU", global_batch=1, sequence_length=16, preset="fp32")
    assert one(seconds(on_cpu, dp_shard=1, zero=0).launch) == 0


@pytest.mark.parametrize(("dp_shard", "tp", "ep"), [(2, 4, 1), (2, 4, 2), (2, 4, 8), (1, 8, 8), (1, 8, 2)])
def test_experts_do_the_same_arithmetic_whoever_holds_them(dp_shard: int, tp: int, ep: int) -> None:
    """Without a rate's loss on small products, cutting an expert and dealing experts out take equally long."""
    request = ideal(request_of(tiny_mixtral(), global_batch=2, sequence_length=4096))
    plan: dict[str, Any] = {"dp_shard": dp_shard, "zero": int(dp_shard > 1), "microbatches": 2 // dp_shard, "tp": tp}
    whole, dealt = seconds(request, **plan), seconds(request, ep=ep, **plan)
    assert one(dealt.matmul_forward) == pytest.approx(one(whole.matmul_forward))


def ideal(request: Request) -> Request:
    """A device without limits but its peak."""
    device = request.cluster.device
    rates = {name: replace(curve, half_flops=0.0) for name, curve in device.rates.items()}
    fast = replace(device, rates=rates, memory_bytes_per_s=1e30)
    return replace(request, cluster=replace(request.cluster, device=fast))


def test_only_the_last_stage_computes_the_head() -> None:
    request = replace(REQUEST, workload=replace(REQUEST.workload, global_batch=8))
    views = views_of(request, columns_with({"pp": 8, "microbatches": 8}))
    heads = [one(block_seconds(view).head_forward) > 0 for view in views]
    assert heads == [False, False, True]
    assert [one(block_seconds(view).loss) > 0 for view in views] == heads


def test_the_flops_of_mfu_are_six_a_weight_and_token() -> None:
    """8B: every parameter but the embedding table and the norms is multiplied; attention 12 l h s / 2 besides."""
    shape = REQUEST.shape
    norms = 65 * 4096
    weights = shape.num_parameters - 128_256 * 4096 - norms
    attention = 3 * 32 * 2 * 2 * 4096.5 * 4096
    assert model_flops(REQUEST) == pytest.approx((6 * weights + attention) * 8 * 8192)


def test_idle_experts_are_not_counted() -> None:
    """Mixtral 8x7B: 46.7B parameters, 12.9B of them active."""
    request = request_of("mixtral-8x7b", global_batch=1, sequence_length=1)
    assert model_flops(request) == pytest.approx(6 * 12.9e9, rel=0.02)


def test_a_device_without_the_dtype_uses_the_nearest_it_has() -> None:
    """V100s have no bf16 units; they count in fp16's rates rather than fail."""
    volta = replace(REQUEST, cluster=hardware.cluster("8xV100-32GB"))
    assert "bfloat16" not in volta.cluster.device.rates
    fp16 = request_of(devices="8xV100-32GB", global_batch=8, sequence_length=8192, preset="fp16")
    assert one(seconds(volta).matmul_forward) == one(seconds(fp16).matmul_forward)


PACKED = replace(REQUEST, workload=replace(REQUEST.workload, document_length=1024.0))
FUSED = replace(PACKED, workload=replace(PACKED.workload, attention="fused"))


def test_mfu_counts_attention_by_documents() -> None:
    """Halves of rows: half of the pairs, but for the diagonal."""
    whole = model_flops(REQUEST)
    without = model_flops(replace(REQUEST, workload=replace(REQUEST.workload, document_length=1.0)))
    one_key = (whole - without) / (8193 / 2 - 1)
    assert whole - model_flops(PACKED) == pytest.approx(one_key * (8192 - 1024) / 2)
    assert model_flops(PACKED, sees_all_keys=True) == model_flops(REQUEST, sees_all_keys=True)


def test_a_fused_kernel_takes_the_time_of_documents_and_a_masked_one_that_of_all_pairs() -> None:
    whole, masked, fused = (one(seconds(request).attention_forward) for request in (REQUEST, PACKED, FUSED))
    assert fused / whole == pytest.approx(1025 / 8193)
    assert masked / whole == pytest.approx(8192 / (8193 / 2))


def test_documents_longer_than_rows_are_whole_rows() -> None:
    long = replace(PACKED, workload=replace(FUSED.workload, document_length=1e9))
    assert model_flops(long) == model_flops(REQUEST)
    assert one(seconds(long).attention_forward) == one(seconds().attention_forward)


def test_context_parallel_parts_of_documents_are_those_of_whole_rows() -> None:
    split = {"dp_shard": 2, "cp": 4}
    found = (one(seconds(request, **split).attention_forward) for request in (REQUEST, PACKED))
    assert len(set(found)) == 1
