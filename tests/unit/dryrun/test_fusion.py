"""Which values of a graph are ever in memory, which kernels are one, and when memory is given back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import weft.dryrun.compiler as compiler
import weft.engine.kernels.compiled as compiled
from weft.comm.watch import OperatorWatch
from weft.dryrun.fusion import Kernel, Program, ProgramError
from weft.engine.measure.tracker import MemoryTracker, Peak

ROWS, WIDTH = 64, 32


def program_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Program:
    return Program(make_fx(function, tracing_mode="fake")(*inputs))


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.randn(ROWS, WIDTH) for _ in range(count)]


def written(kernels: list[Kernel]) -> list[list[str]]:
    """The operators whose results each kernel writes."""
    return [[str(node.target).split(".")[1] for node in kernel.gives] for kernel in kernels]


def test_what_lies_between_is_nowhere() -> None:
    program = program_of(lambda x, w: (x.float().exp() + 1).mul(2).relu() @ w, *tensors(1), torch.randn(WIDTH, WIDTH))
    assert written(program.kernels) == [["relu"], ["mm"]]


def test_a_sum_is_part_of_the_kernel_that_needs_it() -> None:
    program = program_of(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), *tensors(1))
    assert written(program.kernels) == [["mul"]]


def test_what_reads_the_same_is_one_kernel_and_writes_beside_what_it_reads() -> None:
    """The backward of act(gate) * up, which makes the product again: six tensors of one size are there at once."""

    def backward(gradient: Any, gate: Any, up: Any, weight: Any) -> Any:
        inner, act = gradient @ weight, F.silu(gate)
        return gradient.t() @ (act * up), inner * act, inner * up * torch.sigmoid(gate)

    program = program_of(backward, *tensors(3), torch.randn(WIDTH, WIDTH))
    assert written(program.kernels) == [["mm"], ["mul", "mul", "mul"], ["mm"]]
    assert not any(kernel.overwrites for kernel in program.kernels)


def test_kernels_are_apart_where_one_waits_for_the_other() -> None:
    program = program_of(lambda x, w: x + (x.sin() @ w).cos(), *tensors(1), torch.randn(WIDTH, WIDTH))
    assert written(program.kernels) == [["sin"], ["mm"], ["add"]]
    assert program.kernels[2].overwrites == list(program.kernels[1].gives)


def test_an_input_and_what_is_given_are_never_overwritten() -> None:
    def function(x: Any, w: Any) -> Any:
        product = x @ w
        return product, product.relu() @ w, x.sin()

    assert not any(kernel.overwrites for kernel in program_of(function, *tensors(1), torch.randn(WIDTH, WIDTH)).kernels)


def test_results_have_the_form_they_would_have() -> None:
    def function(x: Any, w: Any) -> Any:
        values, places = (x @ w).topk(3)
        return x.t().sin(), values, places.view(-1)[:5], x, (x @ w).view(2, -1, WIDTH).transpose(0, 1)

    given = [*tensors(1), torch.randn(WIDTH, WIDTH)]
    inputs = list(given)
    found = program_of(function, *given)(inputs)
    assert inputs == []
    for left, right in zip(found, function(*given), strict=True):
        assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
    assert found[3] is given[0]


def test_a_graph_it_cannot_run_is_said_so() -> None:
    program = program_of(lambda x, w: x @ w, *tensors(1), torch.randn(WIDTH, WIDTH))
    with pytest.raises(ProgramError, match="mat1 and mat2"):
        program([torch.randn(2, 3), torch.randn(2, 3)])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs one")
@pytest.mark.filterwarnings("ignore")
def test_a_block_s_peaks_are_those_of_the_compiler_s_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real code on a CPU, whose allocations are made to be seen."""
    guards = torch._C._dynamo.guards
    monkeypatch.setattr(
        guards, "_empty_strided_cpu", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    )
    assert _peaks(monkeypatch, compiler._backend) == _peaks(monkeypatch, "inductor")


def _peaks(monkeypatch: pytest.MonkeyPatch, backend: Any) -> tuple[int, int, int]:
    """(kept, peak of the forward, peak of the backward) of a block, in bytes beyond its weights."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.compiler.reset()
    monkeypatch.setattr(compiled, "BACKEND", backend)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa"
    )
    block, hidden = LlamaDecoderLayer(config, 0).bfloat16(), torch.randn(2, 128, 64, dtype=torch.bfloat16)
    rotary = LlamaRotaryEmbedding(config)(hidden, torch.arange(128)[None])
    call, gradient = compiled._Compiled(block.forward), torch.ones_like(hidden)
    call(hidden.requires_grad_(), attention_mask=None, position_embeddings=rotary).backward(gradient)
    block.zero_grad()
    tracker = MemoryTracker(device_type="cpu")
    tracker.start([*block.parameters(), hidden, gradient, *rotary])
    before = tracker.current_bytes
    with tracker.following(), OperatorWatch(tracker):
        out = call(hidden, attention_mask=None, position_embeddings=rotary)
        forward, kept, tracker.peak = tracker.peak.nbytes, tracker.current_bytes, Peak()
        out.backward(gradient)
    return kept - before, forward - before, tracker.peak.nbytes - before
