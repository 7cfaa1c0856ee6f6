"""Attention as a GPU runs it: which kernel, what it keeps, and what it takes while it runs."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.comm.watch import OperatorWatch
from weft.dryrun.kernels import Kernel, gpu_attention, workspace_bytes
from weft.engine.measure.tracker import MemoryTracker

BATCH, HEADS, LENGTH, WIDTH = 2, 8, 256, 64
MIB = 2**20
aten = torch.ops.aten


def qkv(*, dtype: torch.dtype, groups: int = HEADS, width: int = WIDTH) -> list[torch.Tensor]:
    shapes = [(BATCH, HEADS, LENGTH, width), (BATCH, groups, LENGTH, width), (BATCH, groups, LENGTH, width)]
    return [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def kept_bytes(kernel: Kernel, *, dtype: torch.dtype, groups: int = HEADS, masked: bool = False) -> int:
    """What is alive after the forward, the inputs not counted."""
    tracker = MemoryTracker(device_type="cpu")
    with FakeTensorMode():
        mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool) if masked else None
        tensors = qkv(dtype=dtype, groups=groups)
        with tracker.following(), OperatorWatch(tracker):
            out = gpu_attention(kernel)(*tensors, attn_mask=mask, is_causal=mask is None, enable_gqa=groups != HEADS)
            assert out.shape == (BATCH, HEADS, LENGTH, WIDTH)
            return tracker.current_bytes


OUT = BATCH * HEADS * LENGTH * WIDTH
ROW = BATCH * HEADS * LENGTH * 4
SCORES = BATCH * HEADS * LENGTH * LENGTH
MASK = BATCH * LENGTH * LENGTH


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_half_precision_keeps_the_output_and_a_number_a_row(kernel: Kernel, groups: int) -> None:
    assert kept_bytes(kernel, dtype=torch.bfloat16, groups=groups) == pytest.approx(2 * OUT + ROW, abs=2048)


def test_a_mask_of_booleans_is_kept_as_numbers() -> None:
    expected = 2 * OUT + ROW + 2 * MASK
    assert kept_bytes("cudnn", dtype=torch.bfloat16, masked=True) == pytest.approx(expected, abs=2048)


def test_float32_is_fused_only_where_heads_are_not_shared() -> None:
    assert kept_bytes("cudnn", dtype=torch.float32) == pytest.approx(4 * OUT + ROW, abs=2048)
    assert kept_bytes("cudnn", dtype=torch.float32, groups=2) > 4 * SCORES


def test_workspaces_are_those_an_h200_showed() -> None:
    """benchmarks/kernel_workspaces.py: 2 x 32 heads x 4096 x 128, bf16; MiB beyond the gradients."""
    with FakeTensorMode():
        query = torch.empty(2, 32, 4096, 128, dtype=torch.bfloat16)
        backward = aten._scaled_dot_product_cudnn_attention_backward.default
        assert workspace_bytes(backward, (query, query, query)) == pytest.approx(130 * MIB, rel=0.01)
        groups = torch.empty(2, 8, 4096, 128, dtype=torch.bfloat16)
        assert workspace_bytes(backward, (query, query, groups)) == pytest.approx(258 * MIB, rel=0.01)
        gradient, ids = torch.empty(8192, 2048, dtype=torch.bfloat16), torch.empty(8192, dtype=torch.int64)
        embedding = aten.embedding_dense_backward.default
        assert workspace_bytes(embedding, (gradient, ids, 128256, -1, False)) == pytest.approx(70.8 * MIB, rel=0.1)
    assert workspace_bytes(aten.mm.default, ()) == 0


@pytest.mark.parametrize(
    ("rows", "columns", "mib"),
    [(8192, 2048, 128), (8192, 8192, 132), (16384, 12288, 132), (4096, 6400, 134.4), (2048, 50257, 0)],
)
def test_summing_rows_takes_what_an_h200_showed(rows: int, columns: int, mib: float) -> None:
    with FakeTensorMode():
        tensor = torch.empty(2, rows // 2, columns, dtype=torch.bfloat16)
        assert workspace_bytes(aten.sum.dim_IntList, (tensor, [0, 1], True)) == pytest.approx(mib * MIB, rel=0.02)
        assert workspace_bytes(aten.sum.dim_IntList, (tensor, [-1], True)) == 0
