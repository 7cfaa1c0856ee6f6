"""What an HF config may hold: whatever model code reads, by the type and through a folder alike, and nothing else."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.core.errors import ModelError
from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton
from weft.models.config_keys import known_keys, parts_of
from weft.models.hf_config import unread_keys
from weft.models.shape.lookup import shape_from_type

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
# a few of each kind of source file; the slow test has all of them
SAMPLE = ("qwen3_moe", "olmoe", "granitemoehybrid", "gemma3", "mpt", "gpt_neox", "falcon_h1", "bert")


def config_of(model_type: str, **overrides: Any) -> Any:
    return build_config(ModelSpec(type=model_type, config=overrides), vocab_size=257)


def saved(folder: Path, model_type: str, **values: Any) -> Path:
    config_of(model_type, **values).save_pretrained(folder)
    return folder


def from_folder(folder: Path, **overrides: Any) -> Any:
    return build_config(ModelSpec(path=str(folder), config=overrides), vocab_size=257)


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "qwen2", "qwen2_moe", "olmo2", "granite", "cohere", "phi3", "starcoder2"]
)
def test_the_size_of_heads_is_taken_where_the_model_reads_it_and_the_class_does_not_declare_it(
    model_type: str, tmp_path: Path
) -> None:
    sizes = SIZES | {"head_dim": 48}
    by_type = build_skeleton(config_of(model_type, **sizes))
    folder = saved(tmp_path / "model", model_type, **SIZES)
    by_folder = build_skeleton(from_folder(folder, head_dim=48))
    shapes = {name: value.shape for name, value in by_type.named_parameters()}
    assert {name: value.shape for name, value in by_folder.named_parameters()} == shapes
    assert any(4 * 48 in shape or (4 + 2 + 2) * 48 in shape for shape in shapes.values())
    planned = shape_from_type(model_type, sizes)
    assert planned.num_parameters == sum(value.numel() for value in by_type.parameters())


@contextmanager
def attributes_read() -> Iterator[set[tuple[type, str]]]:
    """What is really looked up on a config while a model is built: an oracle that parses no source."""
    original, found = PretrainedConfig.__getattribute__, set()

    def look_up(config: Any, key: str) -> Any:
        found.add((type(config), key))
        return original(config, key)

    PretrainedConfig.__getattribute__ = look_up  # type: ignore[method-assign]
    try:
        yield found
    finally:
        PretrainedConfig.__getattribute__ = original  # type: ignore[method-assign]


def unaccepted(model_type: str) -> set[str]:
    config = CONFIG_MAPPING[model_type]()
    known = {type(one): known_keys(one) for one in (config, *parts_of(config).values())}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        with attributes_read() as found:
            AutoModelForCausalLM.from_config(config)
    return {
        f"{cls.__name__}.{key}"
        for cls, key in found
        if cls in known and not key.startswith("_") and not hasattr(cls, key) and key not in known[cls]
    } - {f"{cls.__name__}.{key}" for cls in known for key in INTERNAL}


# looked up by transformers' loader and by `get_text_config`, on every config, never by a model's own code
INTERNAL = {
    "quantization_config", "auto_map", "pruned_heads", "fusion_config", "distributed_config", "gradient_checkpointing",
    "decoder", "generator", "text_config", "text_encoder", "layer_types",
}  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLE)
def test_whatever_a_model_looks_up_is_accepted(model_type: str) -> None:
    assert not unaccepted(model_type)


@pytest.mark.slow
def test_whatever_any_causal_lm_looks_up_is_accepted() -> None:
    refused, num_built = {}, 0
    for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)):
        try:
            refused[model_type] = unaccepted(model_type)
        except Exception:  # a family without a default config, or that cannot be built on meta
            continue
        num_built += 1
    assert num_built > 150
    assert set().union(*refused.values()) <= MISSED


# read in classes whose annotation names another config of the package
MISSED = {"BltLocalEncoderConfig.head_dim", "Gemma3nTextConfig.use_bidirectional_attention"}


@pytest.mark.parametrize(
    ("model_type", "overrides", "hint"),
    [
        ("qwen3_moe", {"head_dims": 48}, "'head_dim'"),
        ("llama", {"rope_thetas": 1e6}, "'rope_theta'"),
        ("llama", {"sliding_window": 8}, ""),  # Llama has no sliding window: it would be kept, and ignored
        ("gpt2", {"rope_theta": 1e6}, ""),
        ("gemma3", {"hidden_size": 64}, "text_config = { hidden_size"),
        ("gemma3", {"text_config": {"hiden_size": 64}}, "'hidden_size'"),
        ("dbrx", {"ffn_hidden_size": 64}, "ffn_config = { ffn_hidden_size"),
    ],
)
def test_what_nobody_reads_is_refused(model_type: str, overrides: dict[str, Any], hint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no") as caught:
        config_of(model_type, **overrides)
    assert hint in caught.value.hint
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no") as caught:
        from_folder(tmp_path, **overrides)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_rotary_values_work_by_their_published_names(
    model_type: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    plain = dict(build_skeleton(config_of(model_type, **SIZES)).named_buffers())
    by_type = dict(build_skeleton(config_of(model_type, **SIZES, **overrides)).named_buffers())
    by_folder = dict(build_skeleton(from_folder(saved(tmp_path, model_type, **SIZES), **overrides)).named_buffers())
    assert any(not torch.equal(plain[name], by_type[name]) for name in plain)
    assert all(torch.equal(by_type[name], by_folder[name]) for name in plain)


def test_one_rotary_value_for_a_folder_with_tables_by_kind_of_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="for each kind of layer"):
        from_folder(saved(tmp_path, "gemma3_text", **SIZES), rope_theta=5e5)


def test_a_part_of_a_folders_config_is_changed_and_not_replaced(tmp_path: Path) -> None:
    config_of("gemma3", text_config={"hidden_size": 64, "num_hidden_layers": 2}).save_pretrained(tmp_path)
    text = from_folder(tmp_path, text_config={"num_hidden_layers": 1}).get_text_config()
    assert (text.hidden_size, text.num_hidden_layers) == (64, 1)


def test_older_names_that_a_constructor_translates_are_taken() -> None:
    assert config_of("bloom", n_embed=32, n_layer=1, n_head=4).hidden_size == 32
    layers = config_of("cohere2", **SIZES, sliding_window_pattern=2).layer_types
    assert layers == ["sliding_attention", "full_attention"]


def test_a_model_that_is_made_to_look_ahead_is_refused() -> None:
    with pytest.raises(ModelError, match="sees the tokens it is to predict"):
        build_skeleton(config_of("llama", **SIZES, is_causal=False))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_saved_config_has_no_key_that_nothing_reads(family: str, tmp_path: Path) -> None:
    config = build_config(FAMILIES[family], vocab_size=257)
    config.save_pretrained(tmp_path)
    assert not unread_keys(tmp_path, config)


def test_a_likely_misspelling_in_config_json_is_noted_and_remains_of_other_programs_are_not(tmp_path: Path) -> None:
    config = config_of("llama", **SIZES)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    remains = {"auto_map": {}, "_name_or_path": "x", "pretraining_tp": 1, "unsloth_version": "2"}
    file.write_text(json.dumps(json.loads(file.read_text()) | remains | {"num_hiden_layers": 3}))
    (note,) = unread_keys(tmp_path, from_folder(tmp_path))
    assert "num_hiden_layers" in note
    assert "'num_hidden_layers'" in note
