"""The oracle's parts by themselves: formulas against torch's own optimizers and schedulers, rows, documents, config."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from weft.engine.optim.lion import Lion
from weft.verify.oracle.config import check_config
from weft.verify.oracle.documents import read_beginning
from weft.verify.oracle.facts import LoopFacts, Saved
from weft.verify.oracle.initial import check_initial, check_pretrained, draw_statistics
from weft.verify.oracle.rows import Epoch, WrongRowsError
from weft.verify.oracle.schedule import check_schedule, rate_of
from weft.verify.oracle.streams import Stream
from weft.verify.oracle.updates import check_updates

TRAIN: dict[str, Any] = {
    "learning_rate": 1e-2, "steps": 3, "warmup_steps": 1, "final_learning_rate_ratio": 0.1, "schedule": "cosine",
    "weight_decay": 0.1, "clip_norm": 0.0, "frozen": [], "groups": [],
    "ema_decay": 0.0, "betas": [0.9, 0.95], "epsilon": 1e-8, "momentum": 0.9,
}  # fmt: skip
TINY = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64,
)  # fmt: skip


def _make(kind: str, groups: list[dict[str, Any]], momentum: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=momentum)
    if kind == "lion":
        return Lion(groups, lr=1.0, betas=(0.9, 0.95))
    cls = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return cls(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)


def _loop(
    kind: str, momentum: float = 0.9, skipped: frozenset[int] = frozenset(), untrained: tuple[str, ...] = ()
) -> tuple[dict[str, torch.Tensor], LoopFacts]:
    """Three steps of torch's own optimizer on random gradients; those of `skipped`, from 0, make no update."""
    torch.manual_seed(0)
    parameters = {"w": nn.Parameter(torch.randn(6, 5)), "b": nn.Parameter(torch.randn(5))}
    groups = [{"params": [parameters["w"]], "weight_decay": 0.1}, {"params": [parameters["b"]], "weight_decay": 0.0}]
    optimizer = _make(kind, groups, momentum)
    initial = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    saved, norms = {}, []
    for step in range(1, 4):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(TRAIN, step)
        trained = [parameter for name, parameter in parameters.items() if name not in untrained]
        for parameter in trained:
            parameter.grad = torch.randn_like(parameter) * 0.1
            parameter.grad[0] = 0.0 if kind == "lion" else parameter.grad[0]  # as rows of tokens that no batch has
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in trained)))
        if step - 1 not in skipped:
            optimizer.step()
        saved[step] = Saved(
            weights={name: parameter.detach().clone() for name, parameter in parameters.items()},
            states={
                f"{name}.{key}": value.clone()
                for name, parameter in parameters.items()
                for key, value in optimizer.state[parameter].items()
                if isinstance(value, torch.Tensor)
            },
        )
    facts: dict[str, Any] = dict.fromkeys(LoopFacts.__dataclass_fields__)
    facts |= {"losses": [0.0] * 3, "norms": norms, "skipped": skipped, "saved_steps": [1, 2, 3]}
    return initial, LoopFacts(**{**facts, "saved": saved.__getitem__, "rounded_states": "", "is_delayed": False})


@pytest.mark.parametrize(("kind", "momentum"), [("adamw", 0.9), ("adam", 0.9), ("sgd", 0.9), ("sgd", 0.0)])
def test_torchs_own_updates_pass(kind: str, momentum: float) -> None:
    initial, loop = _loop(kind, momentum)
    check = check_updates({**TRAIN, "optimizer": kind, "momentum": momentum}, initial, loop)
    assert check.ok, check.detail


def test_rows_without_a_gradient_only_decay_under_lion() -> None:
    initial, loop = _loop("lion")
    check = check_updates({**TRAIN, "optimizer": "lion"}, initial, loop)
    assert check.ok, check.finding
    assert not check_updates({**TRAIN, "optimizer": "lion", "weight_decay": 0.0}, initial, loop).ok


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("skipped", [{0}, {0, 1}, {1}])
def test_a_step_that_float16_skipped_is_no_update(kind: str, skipped: set[int]) -> None:
    initial, loop = _loop(kind, skipped=frozenset(skipped))
    check = check_updates({**TRAIN, "optimizer": kind}, initial, loop)
    assert check.ok, check.detail


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_a_parameter_without_a_gradient_keeps_its_bits(kind: str) -> None:
    initial, loop = _loop(kind, untrained=("w",))
    train, untrained = {**TRAIN, "optimizer": kind}, frozenset({"w"})
    check = check_updates(train, initial, loop, untrained=untrained)
    assert check.ok, check.detail
    assert not check_updates(train, *_loop(kind), untrained=untrained).ok


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("adamw", {"betas": [0.9, 0.99]}),
        ("adamw", {"epsilon": 1e-4}),
        ("adamw", {"weight_decay": 0.05}),
        ("adamw", {"clip_norm": 0.1}),
        ("adamw", {"frozen": ["b"]}),
        ("adam", {"optimizer": "adamw"}),
        ("sgd", {"weight_decay": 0.0}),
    ],
)
def test_updates_of_other_constants_are_wrong(kind: str, change: dict[str, Any]) -> None:
    initial, loop = _loop(kind)
    assert not check_updates({**TRAIN, "optimizer": kind, **change}, initial, loop).ok


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_rates_are_those_of_torchs_schedulers(schedule: str) -> None:
    train = {**TRAIN, "steps": 50, "warmup_steps": 0, "schedule": schedule}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)
    made: Any = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=1e-3),
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=50),
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    }[schedule]()
    for step in range(1, 51):
        optimizer.step()
        made.step()
        assert rate_of(train, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)


def test_a_rate_that_is_wrong_in_the_last_step_alone_is_found() -> None:
    run = {"train": {**TRAIN, "steps": 5000, "warmup_steps": 100}}

    def rate(step: int) -> float:
        return rate_of(run["train"], step) * (1.001 if step == 5000 else 1.0)

    found = check_schedule(run, rate, run, [])
    assert not found.ok
    assert "step 5000" in found.detail


class _Share:
    """Rows of a stream in an order."""

    def __init__(self, stream: Stream, order: list[int]) -> None:
        self.stream, self.order, self.ranges = stream, order, ()
        self.num_rows = stream.num_rows

    def batch(self, position: int, *, dp_rank: int, dp_degree: int) -> Any:
        epoch, share = divmod(position, len(self.order))[0], 4 // dp_degree
        order = self.order if epoch == 0 else self.order[::-1]
        at = [(position + dp_rank * share + index) % len(order) for index in range(share)]
        return self.stream.batch(self.stream.rows([order[index] for index in at]))


def _stream(*, isolates: bool = False) -> Stream:
    tokens = np.tile(np.array([1, 2, 3, 9, 1, 2, 4, 5, 9, 6]), 40)[: 8 * 40 + 1]  # a text that repeats itself
    return Stream(tokens=tokens, length=8, end=9, isolates=isolates)


@pytest.mark.parametrize("isolates", [False, True])
def test_every_row_once_passes_though_texts_repeat(isolates: bool) -> None:
    stream = _stream(isolates=isolates)
    share: Any = _Share(stream, list(np.random.default_rng(0).permutation(stream.num_rows)))
    assert "once" in Epoch(share=share, stream=stream, rows=4, num_epochs=None).check(dp_degree=2)


def test_a_row_too_often_is_found() -> None:
    stream = Stream(tokens=np.random.default_rng(1).integers(0, 50, 321), length=8, end=9, isolates=False)
    share: Any = _Share(stream, [0, *range(stream.num_rows - 1)])
    with pytest.raises(WrongRowsError):
        Epoch(share=share, stream=stream, rows=4, num_epochs=None).check(dp_degree=1)


def test_documents_are_read_as_the_guide_says(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_bytes(b"second")
    (tmp_path / "a.md").write_bytes(b"first")
    (tmp_path / ".hidden.txt").write_bytes(b"never")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in ("third", "", "fourth")))
    data = {"source": str(tmp_path), "tokenizer": "bytes", "text_field": "body"}
    found = read_beginning(data, end_of_document=256)
    texts = bytes(token if token < 256 else 0 for token in found.tokens.tolist()).split(b"\0")
    assert texts == [b"first", b"second", b"third", b"fourth", b""]
    assert (found.num_documents, found.is_complete) == (4, True)


def test_a_config_of_another_epsilon_is_found() -> None:
    other = LlamaConfig(**{**TINY.to_dict(), "rms_norm_eps": 1e-3})
    assert check_config(TINY, TINY, TINY, vocab_size=64).ok
    found = check_config(TINY, TINY, other, vocab_size=64)
    assert not found.ok
    assert "rms_norm_eps" in found.detail


def test_pretrained_weights_are_compared_bit_by_bit(tmp_path: Path) -> None:
    model = LlamaForCausalLM(TINY)
    model.save_pretrained(tmp_path)
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert check_pretrained(str(tmp_path), found).ok
    found["model.norm.weight"][3] += 1e-6
    assert not check_pretrained(str(tmp_path), found).ok


def test_initial_weights_of_transformers_pass_and_a_quarter_more_does_not() -> None:
    statistics = draw_statistics(TINY)
    torch.manual_seed(5)
    found = {name: parameter.detach().clone() for name, parameter in LlamaForCausalLM(TINY).named_parameters()}
    assert check_initial(statistics, found, without_rule=frozenset()).ok
    name = "model.layers.1.mlp.down_proj.weight"
    assert not check_initial(statistics, {**found, name: 1.25 * found[name]}, without_rule=frozenset()).ok
