"""What GPU kernels take beside their results: the bytes no dispatch mode sees, for the table in `dryrun/kernels.py`.

    python benchmarks/kernel_workspaces.py

For each operator: peak allocated during the call, less what was there before, less its results.
Attention also shows which kernel a GPU takes (the name of its autograd node).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

MIB = 2**20
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def held() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def measure(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """(bytes kept after the call, bytes taken beyond that while it ran, its result)."""
    gc.collect()
    before = held()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    after = held()
    return after - before, torch.cuda.max_memory_allocated() - after, result


def attention_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    base: dict[str, Any] = {"batch": 2, "heads": 32, "groups": 32, "length": 4096, "width": 128, "dtype": BF16}
    yield "bf16", base
    yield "bf16 8 groups", {**base, "groups": 8}
    yield "bf16 8 groups 8192", {**base, "batch": 1, "groups": 8, "length": 8192}
    yield "bf16 odd length", {**base, "length": 4000}
    yield "fp16", {**base, "dtype": FP16}
    for width in (64, 80, 96, 192, 256):
        yield f"bf16 width {width}", {**base, "width": width, "heads": 16, "groups": 16}
    yield "bf16 width 256 4 of 8 groups", {**base, "width": 256, "heads": 8, "groups": 4}
    yield "bf16 width 192, value 128", {**base, "width": 192, "value_width": 128, "heads": 16, "groups": 16}
    yield "bf16 mask", {**base, "heads": 16, "groups": 16, "mask": torch.bool}
    yield "bf16 added mask", {**base, "heads": 16, "groups": 16, "mask": BF16}
    yield "bf16 mask 8 groups", {**base, "heads": 16, "groups": 8, "mask": torch.bool, "length": 2048}
    yield "fp32", {**base, "dtype": FP32, "heads": 16, "groups": 16, "length": 2048}
    yield "fp32 8 groups", {**base, "dtype": FP32, "heads": 16, "groups": 8, "length": 2048}
    yield "fp32 mask", {**base, "dtype": FP32, "heads": 16, "groups": 16, "length": 2048, "mask": torch.bool}
    yield "bf16 dropout", {**base, "dropout": 0.1}


def run_attention(case: dict[str, Any]) -> str:
    batch, length, width = case["batch"], case["length"], case["width"]

    def tensor(heads: int, width: int) -> torch.Tensor:
        # transposed, as models hand it over
        flat = torch.randn(batch, length, heads, width, device="cuda", dtype=case["dtype"])
        return flat.transpose(1, 2).requires_grad_()

    query, key = tensor(case["heads"], width), tensor(case["groups"], width)
    value = tensor(case["groups"], case.get("value_width", width))
    mask = None
    if "mask" in case:
        mask = torch.ones(length, length, device="cuda", dtype=torch.bool).tril().expand(batch, 1, length, length)
        mask = mask if case["mask"] is torch.bool else torch.zeros_like(mask, dtype=case["mask"])
    is_grouped = case["heads"] != case["groups"]

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=case.get("dropout", 0.0), is_causal=mask is None,
            enable_gqa=is_grouped,
        )  # fmt: skip

    forward().sum().backward()
    query.grad = key.grad = value.grad = None
    kept, forward_extra, out = measure(forward)
    gradient = torch.ones_like(out)
    gradients, backward_extra, _ = measure(lambda: torch.autograd.grad(out, (query, key, value), gradient))
    node = out.grad_fn.name() if out.grad_fn is not None else "?"
    q, o = query.numel() * query.element_size(), out.numel() * out.element_size()
    return (
        f"{node:46s} kept {kept / MIB:9.1f} (out {o / MIB:8.1f}, lse {4 * batch * case['heads'] * length / MIB:6.1f})"
        f"  forward + {forward_extra / MIB:9.1f}  backward gives {gradients / MIB:9.1f} (q {q / MIB:8.1f},"
        f" k {key.numel() * key.element_size() / MIB:8.1f})  + {backward_extra / MIB:9.1f}"
    )


def other_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    tokens, hidden, vocab = 8192, 2048, 128256
    ids = torch.randint(vocab, (tokens,), device="cuda")
    gradient = torch.randn(tokens, hidden, device="cuda", dtype=BF16)
    yield "embedding backward bf16", lambda: torch.ops.aten.embedding_dense_backward(gradient, ids, vocab, -1, False)
    logits = torch.randn(tokens, 32000, device="cuda")
    yield "log_softmax fp32", lambda: F.log_softmax(logits, -1)
    yield "sort", lambda: torch.sort(ids)
    scores = torch.randn(tokens, 64, device="cuda")
    yield "topk 8 of 64", lambda: torch.topk(scores, 8)
    rows = torch.randint(tokens, (tokens * 8,), device="cuda")
    source, target = torch.randn(tokens * 8, hidden, device="cuda", dtype=BF16), torch.zeros_like(gradient)
    yield "index_add_ bf16", lambda: target.index_add_(0, rows, source)
    yield "index (gather rows) bf16", lambda: gradient[rows]
    yield "index_put accumulate bf16", lambda: torch.ops.aten.index_put(target, [rows], source, True)
    if hasattr(torch, "_grouped_mm"):
        weights = torch.randn(64, hidden, 1024, device="cuda", dtype=BF16)
        offsets = torch.arange(1024, 65 * 1024, 1024, device="cuda", dtype=torch.int32)[:64]
        yield "grouped_mm bf16", lambda: torch._grouped_mm(source, weights, offs=offsets)
    yield "layer_norm bf16", lambda: F.layer_norm(gradient, (hidden,))
    norm = torch.nn.LayerNorm(hidden, device="cuda", dtype=BF16)
    leaf = gradient.clone().requires_grad_()
    out = norm(leaf)
    yield (
        "layer_norm backward bf16",
        lambda: torch.autograd.grad(out, [leaf, norm.weight, norm.bias], gradient, retain_graph=True),
    )
    yield "sum to bias bf16", lambda: gradient.sum(0)
    matrix = torch.randn(hidden, 8192, device="cuda", dtype=BF16)
    yield "mm bf16", lambda: gradient @ matrix
    yield "mm fp32", lambda: gradient.float() @ matrix.float()
    yield "cumsum", lambda: torch.cumsum(ids, 0)
    yield "one_hot", lambda: F.one_hot(rows % 64, 64)
    yield "nonzero", lambda: torch.nonzero(scores > 1)
    yield "histc", lambda: torch.histc(rows.float(), bins=64, min=0, max=63)
    yield "rms_norm fused bf16", lambda: F.rms_norm(gradient, (hidden,))


def main() -> None:
    print(torch.__version__, torch.cuda.get_device_name(), "cudnn", torch.backends.cudnn.version())
    warm = torch.randn(1024, 1024, device="cuda", dtype=BF16)
    (warm @ warm).sum().item()
    for name, case in attention_cases():
        try:
            print(f"attention {name:32s} {run_attention(case)}", flush=True)
        except Exception as error:  # the table goes on without it
            print(f"attention {name:32s} {type(error).__name__}: {str(error)[:120]}", flush=True)
    for name, call in other_cases():
        try:
            call()
            kept, extra, _ = measure(call)
            print(f"{name:42s} gives {kept / MIB:9.1f}  + {extra / MIB:9.2f}", flush=True)
        except Exception as error:
            print(f"{name:42s} {type(error).__name__}: {str(error)[:120]}", flush=True)


if __name__ == "__main__":
    main()
