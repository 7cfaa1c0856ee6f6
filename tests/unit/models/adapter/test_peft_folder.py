"""PEFT's folder format: names, shapes and keys of its two files; an adapter continues from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import CPU, adapted_run
from safetensors.torch import load_file, save_file

from weft.core.adapter_spec import AdapterSpec
from weft.core.errors import AdapterError, BadValueError
from weft.core.run_spec import RunSpec
from weft.models.adapter.build import initial_weights, run_skeleton
from weft.models.adapter.lora import factor_names
from weft.models.adapter.peft_folder import target_modules, write_peft_folder
from weft.models.build import build_config


def written(folder: Path, family: str = "llama", adapter: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    run = adapted_run(family, adapter)
    model = run_skeleton(run, build_config(run.model, vocab_size=257))
    factors = {name: torch.randn(model.get_parameter(name).shape) for name in factor_names(model)}
    write_peft_folder(folder, factors, run.adapter, base="some/base")
    return factors


def test_names_shapes_and_config_are_peft_s(tmp_path: Path) -> None:
    """Facts of PEFT 0.21: benchmarks/lora_peft.py loads such a folder with PEFT itself."""
    factors = written(tmp_path, adapter={"targets": ["q_proj", "down_proj"], "rslora": True})
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored.keys() == {f"base_model.model.{name}" for name in factors}
    assert stored["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (4, 32)
    assert stored["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (32, 4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8.0, "use_rslora": True, "bias": "none",
        "base_model_name_or_path": "some/base", "target_modules": ["down_proj", "q_proj"], "fan_in_fan_out": False,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def test_target_modules_are_full_names_where_an_end_is_ambiguous() -> None:
    assert target_modules(["h.0.q", "h.1.q"], ["h.0.k"]) == ["q"]
    assert target_modules(["h.0.q"], ["h.1.q"]) == ["h.0.q"]


def test_training_continues_an_adapter(tmp_path: Path) -> None:
    factors = written(tmp_path, adapter={"targets": ["v_proj"], "rank": 2, "alpha": 3})
    model = adapted_run("llama").model.model_dump(exclude_none=True)
    run = RunSpec.from_tables({"model": model, "adapter": {"kind": "lora", "path": str(tmp_path)}})
    assert (run.adapter.rank, run.adapter.alpha) == (2, 3)
    config = build_config(run.model, vocab_size=257)
    assert sorted(factor_names(run_skeleton(run, config))) == sorted(factors)
    found = dict(initial_weights(run, config, device=CPU).readers(list(factors)))
    assert all(torch.equal(read(()), factors[name]) for name, read in found.items())
    again = RunSpec.from_tables(run.model_dump(mode="json", exclude_none=True))  # run.toml of the run folder
    assert again.adapter == run.adapter


def test_a_folder_that_does_not_match_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(BadValueError, match="rank = 8 is not that of"):
        RunSpec.from_tables({"model": {"type": "llama"}, "adapter": {"kind": "lora", "rank": 8, "path": str(tmp_path)}})
    with pytest.raises(BadValueError, match=r"has no adapter_config\.json"):
        RunSpec.from_tables({"model": {"type": "llama"}, "adapter": {"kind": "lora", "path": str(tmp_path / "none")}})
    run = adapted_run("qwen3-tied", read(tmp_path))
    with pytest.raises(AdapterError, match=r"no layer matches 'model.layers.2"):
        initial_weights(run, build_config(run.model, vocab_size=257), device=CPU)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(BadValueError, match="missing or damaged"):
        adapted_run("llama", {"path": str(tmp_path)})


def read(folder: Path) -> dict[str, Any]:
    """The keys of a run that continues the adapter in `folder`."""
    found = AdapterSpec.model_validate({"kind": "lora", "path": str(folder)})
    return {"rank": found.rank, "alpha": found.alpha, "path": str(folder)}


def test_features_that_weft_does_not_train_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    with pytest.raises(BadValueError, match="use_dora = True"):
        RunSpec.from_tables({"model": {"type": "llama"}, "adapter": {"kind": "lora", "path": str(tmp_path)}})


def test_a_shape_of_another_base_is_refused(tmp_path: Path) -> None:
    factors = written(tmp_path)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    stored = {f"base_model.model.{key}": value for key, value in factors.items()}
    save_file({**stored, f"base_model.model.{name}": torch.zeros(4, 64)}, tmp_path / "adapter_model.safetensors")
    run = adapted_run("llama", {"path": str(tmp_path)})
    with pytest.raises(AdapterError, match=r"is \[4, 64\]"):
        initial_weights(run, build_config(run.model, vocab_size=257), device=CPU)
