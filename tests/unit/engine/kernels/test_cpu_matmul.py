"""16-bit products on a CPU without them: float32's, rounded once; other formats as before. In an own process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tiny import FAMILIES, build_engine

from weft.engine.kernels import cpu_matmul as cpu_products
from weft.models.build import build_config, build_skeleton
from weft.verify.reference import prepare
from weft.verify.run_trace import BatchSplit, ReferencePrecision

CHECK = """
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from weft.engine.kernels.cpu_matmul import install

BF16 = torch.bfloat16
torch.manual_seed(0)
a, b, c = (torch.randn(48, 48, requires_grad=True) for _ in range(3))
before = [a @ b, torch.addmm(c, a, b, beta=0.5, alpha=2.0), torch.bmm(a[None], b[None])]
install()
install()
after = [a @ b, torch.addmm(c, a, b, beta=0.5, alpha=2.0), torch.bmm(a[None], b[None])]
assert all(torch.equal(x, y) for x, y in zip(before, after)), "float32 has other bits"

x, y, z = (value.detach().bfloat16().requires_grad_() for value in (a, b, c))
X, Y, Z = (value.detach().float().requires_grad_() for value in (x, y, z))
for low, wide in (
    (x @ y, X @ Y),
    (torch.addmm(z, x, y, beta=0.5, alpha=2.0), torch.addmm(Z, X, Y, beta=0.5, alpha=2.0)),
    (torch.bmm(x[None], y[None]), torch.bmm(X[None], Y[None])),
    (torch.baddbmm(z[None], x[None], y[None]), torch.baddbmm(Z[None], X[None], Y[None])),
):
    assert low.dtype == BF16
    assert torch.equal(low, wide.bfloat16())
into = torch.empty(48, 48, dtype=BF16)
with torch.no_grad():
    assert torch.mm(x, y, out=into) is into
    assert torch.equal(into, (X @ Y).bfloat16())
half = x.detach().half()
assert torch.equal(half @ half, (half.float() @ half.float()).half())
for left, right in zip(torch.autograd.grad((x @ y).sum(), (x, y)), torch.autograd.grad((X @ Y).sum(), (X, Y))):
    assert torch.equal(left, right.bfloat16())

q, k, v = (torch.randn(2, 3, 16, 8).bfloat16().requires_grad_() for _ in range(3))
wide = [value.detach().float().requires_grad_() for value in (q, k, v)]
out, expected = (F.scaled_dot_product_attention(*given, is_causal=True) for given in ((q, k, v), wide))
assert torch.equal(out, expected.bfloat16())
assert out.stride() == expected.stride()
arriving = torch.randn_like(out)
for left, right in zip(
    torch.autograd.grad(out, (q, k, v), arriving), torch.autograd.grad(expected, wide, arriving.float())
):
    torch.testing.assert_close(left, right.bfloat16(), rtol=2e-2, atol=2e-2)  # the backward reads the rounded output


class Seen(TorchDispatchMode):
    names = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


with torch.no_grad(), Seen():
    x @ y
assert Seen.names == ["aten.mm.default"], Seen.names
print("as it should be")
"""


def test_products_are_those_of_float32_rounded_once() -> None:
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK], capture_output=True, text=True, check=False, timeout=120
    )
    assert told.stdout == "as it should be\n", told.stderr


@pytest.mark.parametrize("has_them", [True, False])
@pytest.mark.parametrize("preset", ["fp32", "bf16", "fp16"])
def test_an_engine_mends_what_its_cpu_lacks(has_them: bool, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mended: list[str] = []
    assert torch.ops.mkldnn._is_mkldnn_bf16_supported() == cpu_products.has_bfloat16()
    monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: has_them)
    monkeypatch.setattr(cpu_products, "install", lambda: mended.append(preset))
    build_engine("llama", {"precision": {"preset": preset}})
    assert mended == ([] if has_them or preset == "fp32" else [preset])


def test_the_reference_of_verify_has_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    mended: list[str] = []
    monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: False)
    monkeypatch.setattr(cpu_products, "install", lambda: mended.append("bf16"))
    model = build_skeleton(build_config(FAMILIES["llama"], vocab_size=257)).to_empty(device="cpu")
    for compute in (torch.float32, torch.bfloat16):
        prepare(model, ReferencePrecision(compute=compute, master=torch.float32), BatchSplit(chunk_rows=1))
    assert mended == ["bf16"]
