"""The peers of the GPU benchmark at toy sizes: they train what they say, and what is timed is what was asked."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from benchmark_folder import benchmarks_importable

with benchmarks_importable():
    import gpu_cases
    import gpu_peers
    import gpu_titan


def tiny_case(peer: str, *, shape: str = "llama-3.2-1b", experts: str | None = None) -> gpu_peers.Case:
    return gpu_peers.Case(
        peer=peer, config=gpu_cases.shrunk(gpu_cases.SHAPES[shape]), rows=2, sequence=32, steps=3, warmup=2, tiny=True,
        experts=experts,
    )  # fmt: skip


def test_the_eager_peer_trains_the_hf_model_on_the_same_tokens() -> None:
    """Its losses against the same steps in full precision, written out."""
    case = tiny_case("eager")
    found = gpu_peers.measure(case)
    model, batches = gpu_peers.hf_model(case), gpu_peers.token_batches(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for index in range(case.warmup + case.steps):
        loss = model(input_ids=batches[index % 4], labels=batches[index % 4]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert found["loss_first"] == pytest.approx(losses[0], rel=2e-3)
    assert found["loss_last"] == pytest.approx(losses[-1], rel=2e-3)
    assert found["loss_last"] != found["loss_first"]
    assert len(found["steps_s"]) == case.steps
    assert found["tokens_per_s"] == pytest.approx(case.num_tokens / found["step_s"])
    assert found["versions"]["torch"] == torch.__version__


def test_the_sharded_peer_is_one_rank_of_eight_and_finite() -> None:
    found = gpu_peers.measure(tiny_case("fsdp2"))
    assert math.isfinite(found["loss_last"])
    assert found["loss_last"] != found["loss_first"]
    assert not torch.distributed.is_initialized()


def test_the_way_of_multiplying_by_experts_is_the_one_asked_for() -> None:
    for experts in ("eager", "grouped_mm"):
        model = gpu_peers.hf_model(tiny_case("eager", shape="mixtral", experts=experts))
        assert model.config._experts_implementation == experts


def test_only_the_timed_steps_are_timed_and_only_their_losses_kept() -> None:
    case = tiny_case("eager")
    recorder = case.recorder()
    for index in range(case.warmup + case.steps + 1):  # Lightning's loop has one step more
        recorder.before(index)
        recorder.keep_loss(index, torch.tensor(float(index)))
    found = recorder.figures(case.num_tokens)
    assert len(found["steps_s"]) == case.steps
    assert found["loss_first"] == 0
    assert found["loss_last"] == case.warmup + case.steps - 1


def test_a_loop_that_ended_early_is_no_result() -> None:
    case = tiny_case("eager")
    recorder = case.recorder()
    for index in range(case.warmup + 1):
        recorder.before(index)
        recorder.keep_loss(index, torch.zeros(()))
    with pytest.raises(RuntimeError, match="0 steps were timed where 3 were asked for"):
        recorder.figures(case.num_tokens)


def test_a_missing_peer_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setattr(sys, "argv", ["gpu_peers.py", "--peer", "accelerate", "--tiny", "--json"])
    assert gpu_peers.main() == 1
    assert json.loads(capsys.readouterr().out) == {"peer": "accelerate", "error": "accelerate is not installed here"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "eager", "--float8", "--tiny"], "torchtitan's"),
        (["--peer", "torchtitan", "--shape", "phi3", "--tiny"], "its own model"),
        (["--peer", "eager", "--config-json", "nowhere.json", "--tiny"], "no file nowhere.json"),
        (["--peer", "eager", "--warmup", "0", "--tiny"], "at least 1"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_peers.py", *arguments])
    with pytest.raises(SystemExit):
        gpu_peers.main()
    assert said in capsys.readouterr().err


def test_labels_are_the_next_tokens_and_the_last_has_none() -> None:
    assert gpu_titan._next_tokens(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]
