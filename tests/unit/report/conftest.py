"""A run folder as `weft train` leaves it, made of plain numbers: the report is tested without training anything."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from weft.core.plan import Plan
from weft.core.records import ParameterRecord, StepRecord
from weft.core.run_spec import RunSpec


@dataclass
class Page:
    """What a browser would find in a page, taken apart."""

    tags: Counter[str] = field(default_factory=Counter)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)  # (tag, name, value)
    scripts: list[tuple[dict[str, str], str]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    text: str = ""

    def figures(self) -> dict[str, Any]:
        """The plotly figures by key."""
        found = {attrs["id"]: body for attrs, body in self.scripts if attrs.get("id", "").startswith("figure-")}
        return {name.removeprefix("figure-"): json.loads(body) for name, body in found.items()}

    def code(self) -> list[str]:
        """The scripts that run."""
        return [body for attrs, body in self.scripts if "type" not in attrs]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.page.tags[tag] += 1
        self.page.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag
        if tag == "script":
            self.page.scripts.append(({name: value or "" for name, value in attrs}, ""))
        if tag == "style":
            self.page.styles.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            attrs, body = self.page.scripts[-1]
            self.page.scripts[-1] = (attrs, body + data)
        elif self._inside == "style":
            self.page.styles[-1] += data
        else:
            self.page.text += f"{data} "


def read_page(path: Path) -> Page:
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    reader.page.text = " ".join(reader.page.text.split())
    return reader.page


def make_steps(num_steps: int, *, seed: int = 0, eval_every: int = 50) -> list[dict[str, Any]]:
    noise = random.Random(seed)
    records = []
    for step in range(1, num_steps + 1):
        loss = 1.6 + 4.0 * math.exp(-step / 45) + noise.gauss(0, 0.06)
        step_s = (1.9 if step == 1 else 0.36) + abs(noise.gauss(0, 0.02))
        record = StepRecord(
            step=step,
            loss=loss,
            grad_norm=0.4 + 6 * math.exp(-step / 20) + abs(noise.gauss(0, 0.12)),
            tokens=8_160,
            learning_rate=1e-3 * min(step / 10, 0.55 + 0.45 * math.cos(math.pi * step / num_steps)),
            step_s=step_s,
            tokens_per_s=8_160 / step_s,
            peak_memory_bytes=318_000_000,
            eval_loss=loss + 0.09 if step % eval_every == 0 else None,
        )
        records.append(record.as_dict())
    return records


def make_coverage(num_layers: int, *, hidden: int = 256, axes: tuple[str, ...] = ("dp_shard",)) -> list[dict[str, Any]]:
    shapes = {
        **{f"self_attn.{x}_proj.weight": (hidden, hidden) for x in "qkvo"},
        "mlp.gate_proj.weight": (3 * hidden, hidden),
        "mlp.up_proj.weight": (3 * hidden, hidden),
        "mlp.down_proj.weight": (hidden, 3 * hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    rows = [parameter("model.embed_tokens.weight", (260, hidden), unit="(root)", axes=axes)]
    for layer in range(num_layers):
        unit = f"model.layers.{layer}"
        rows += [parameter(f"{unit}.{name}", shape, unit=unit, axes=axes) for name, shape in shapes.items()]
    rows.append(parameter("model.norm.weight", (hidden,), unit="(root)", axes=axes))
    tie = "model.embed_tokens.weight"
    rows.append(parameter("lm_head.weight", (260, hidden), unit="(root)", axes=axes, tied_to=tie))
    return rows


def parameter(
    name: str, shape: tuple[int, ...], *, unit: str, axes: tuple[str, ...] = ("dp_shard",), **fields: Any
) -> dict[str, Any]:
    record = ParameterRecord(
        name=name,
        shape=shape,
        dtype="torch.float32",
        unit=unit,
        sharded_axes=axes,
        replicated_axes=(),
        local_elements=math.prod(shape) // 2,
    )
    return dataclasses.asdict(dataclasses.replace(record, **fields))


def make_ledger(*, num_ranks: int = 2, num_steps: int = 200) -> dict[str, Any]:
    terms = {"weights": 10_600_000, "gradients": 10_600_000, "optimizer_state": 21_200_000, "buffers": 65_536}
    ranks = []
    for rank in range(num_ranks):
        peak = 312_000_000 + 3_000_000 * (rank % 3)
        ranks.append({"rank": rank, "peak_bytes": peak, "terms": {**terms, "other": peak - sum(terms.values())}})
    measured = ranks[0]["terms"]
    seconds = {"data": 0.004, "forward_backward": 0.311, "optimizer": 0.038, "evaluation": 0.012, "checkpoint": 0.002}
    dtypes = [("weights", "float32"), ("gradients", "float32"), ("optimizer_state", "float32"), ("loss", "float32")]
    return {
        "version": 1,
        "run": {
            "strategy": "ZeRO-3 (FSDP)",
            "num_ranks": num_ranks,
            "device": "cpu",
            "device_name": "AMD EPYC 7763 64-Core Processor",
            "versions": {"weft": "0.1.0", "torch": "2.13.0", "transformers": "5.22.0", "python": "3.12.9"},
            "started": "2026-03-01T09:30:00+00:00",
            "elapsed_s": 84.2,
            "status": "finished",
            "steps": num_steps,
            "resumed_from": None,
        },
        "model": {
            "name": "llama",
            "parameters": 5_313_792,
            "trainable_parameters": 5_313_792,
            "units": [f"model.layers.{layer}" for layer in range(6)],
            "notes": ["6 blocks of LlamaDecoderLayer under model.layers are one unit each; the rest is the root unit."],
        },
        "memory": {
            "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
            "ranks": ranks,
            "terms": {name: {"predicted": None, "dry_run": None, "measured": size} for name, size in measured.items()},
        },
        "traffic": [],
        "time": {
            "step_s": 0.362,
            "terms": {name: {"predicted": None, "measured": value} for name, value in seconds.items()},
        },
        "dtypes": [{"component": name, "asked": asked, "found": [f"torch.{asked}"]} for name, asked in dtypes],
        "coverage": make_coverage(6),
        "checkpoints": [
            {"step": 100, "path": "checkpoints/step-00000100", "bytes": 63_800_000, "seconds": 0.42},
            {"step": 200, "path": "checkpoints/step-00000200", "bytes": 63_800_000, "seconds": 0.39},
        ],
    }


def write_folder(
    folder: Path,
    *,
    steps: list[dict[str, Any]] | None = None,
    ledger: dict[str, Any] | None = None,
    run_text: str | None = None,
    plan_text: str | None = None,
) -> Path:
    """The files that are given; None leaves a file out."""
    folder.mkdir(parents=True, exist_ok=True)
    if steps is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    if ledger is not None:
        (folder / "ledger.json").write_text(json.dumps(ledger), encoding="utf-8")
    if run_text is not None:
        (folder / "run.toml").write_text(run_text, encoding="utf-8")
    if plan_text is not None:
        (folder / "plan.toml").write_text(plan_text, encoding="utf-8")
    return folder


def write_whole_folder(folder: Path, *, num_steps: int = 200, **files: Any) -> Path:
    """A finished run; `files` replace or (None) remove parts."""
    whole = {
        "steps": make_steps(num_steps),
        "ledger": make_ledger(num_steps=num_steps),
        "run_text": RunSpec.default().to_toml(),
        "plan_text": Plan.from_tables({"mesh": {"dp_shard": 2}}).to_toml(),
    }
    return write_folder(folder, **{**whole, **files})


@pytest.fixture
def whole_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a finished run into a fresh folder; keywords replace its files or, with None, leave them out."""
    return lambda **files: write_whole_folder(tmp_path / "run", **files)


@pytest.fixture
def steps_of() -> Callable[..., list[dict[str, Any]]]:
    return make_steps


@pytest.fixture
def ledger_of() -> Callable[..., dict[str, Any]]:
    return make_ledger


@pytest.fixture
def parameter_of() -> Callable[..., dict[str, Any]]:
    return parameter


@pytest.fixture
def coverage_of() -> Callable[..., list[dict[str, Any]]]:
    return make_coverage


@pytest.fixture
def page_of() -> Callable[[Path], Any]:
    return read_page
