"""Every tensor of a saved model reads back as the model holds it, whole and in slices; every defect has its message."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from weft.core.errors import WeightsError
from weft.models import conversion, weight_files
from weft.models.pretrained import PretrainedWeights
from weft.models.weight_files import WeightFiles, full_index

Model = Callable[[str], Any]

# how save_pretrained may have written a model: one file, many files, the model's own names instead of the hub's
WAYS: dict[str, dict[str, Any]] = {
    "one file": {},
    "shards": {"max_shard_size": "20KB"},
    "own names": {"save_original_format": False},
}


def a_slice(generator: random.Random, shape: torch.Size) -> tuple[slice, ...]:
    bounds = [sorted(generator.choices(range(size + 1), k=2)) for size in shape]
    return tuple(slice(low, high) for low, high in bounds)


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change what a single-file folder stores."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_tensor_reads_as_the_model_holds_it(
    case: str, way: str, tiny_model: Model, tiny_skeleton: Model, tmp_path: Path
) -> None:
    model, generator = tiny_model(case), random.Random(0)
    saved(model, tmp_path, **WAYS[way])
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (way == "shards")
    with PretrainedWeights(tmp_path, tiny_skeleton(case)) as weights:
        assert (weights.missing(), weights.unexpected()) == ([], [])
        held = model.state_dict()
        buffers = [name for name, _ in model.named_buffers() if name in held]
        assert weights.names() == [name for name, _ in model.named_parameters()] + buffers
        for name, value in held.items():  # tied names included
            assert torch.equal(weights.read(name), value), name
            index = a_slice(generator, value.shape)
            part = weights.read(name, index)
            assert torch.equal(part, value[index]), (name, index)
            assert part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.nbytes, "a slice keeps more than itself in memory"


def test_a_tied_weight_is_listed_once_and_found_under_either_name(
    tiny_model: Model, tiny_skeleton: Model, tmp_path: Path
) -> None:
    model = tiny_model("qwen3-tied")
    saved(model, tmp_path)

    def under_the_other_name(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(tmp_path, under_the_other_name)
    with PretrainedWeights(tmp_path, tiny_skeleton("qwen3-tied")) as weights:
        assert "lm_head.weight" not in weights.names()
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            assert torch.equal(weights.read(name), model.lm_head.weight)


def test_tied_names_that_store_different_values_are_refused(
    tiny_model: Model, tiny_skeleton: Model, tmp_path: Path
) -> None:
    saved(tiny_model("qwen3-tied"), tmp_path)

    def untie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    rewrite(tmp_path, untie)
    with PretrainedWeights(tmp_path, tiny_skeleton("qwen3-tied")) as weights:
        with pytest.raises(WeightsError, match=r"model\.embed_tokens\.weight.*lm_head\.weight") as caught:
            weights.read("model.embed_tokens.weight", (slice(0, 1),))
        assert "tie_word_embeddings" in caught.value.hint


def test_a_base_model_saved_without_its_prefix_is_found(
    tiny_model: Model, tiny_skeleton: Model, tmp_path: Path, stored_in: Callable[[Path], dict[str, torch.Tensor]]
) -> None:
    model = tiny_model("gpt2")
    saved(model.transformer, tmp_path)
    assert "wte.weight" in stored_in(tmp_path)
    with PretrainedWeights(tmp_path, tiny_skeleton("gpt2")) as weights:
        for name, value in model.state_dict().items():
            assert torch.equal(weights.read(name), value), name


def test_a_rule_that_catches_one_of_the_models_own_names_is_not_applied(
    tiny_model: Model, tiny_skeleton: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As deepseek_v4's rules do: they are meant for the names on the hub, and run on the model's own as well."""
    rule = conversion.WeightRenaming("q_proj", "query")
    monkeypatch.setattr(conversion, "get_model_conversion_mapping", lambda model: [rule])
    model = tiny_model("llama")
    saved(model, tmp_path)
    with PretrainedWeights(tmp_path, tiny_skeleton("llama")) as weights:
        name = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(weights.read(name), model.get_parameter(name))


def test_a_slice_of_experts_reads_only_those_experts(
    tiny_model: Model, tiny_skeleton: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tiny_model("mixtral"), tmp_path)
    asked: list[str] = []
    original = WeightFiles.read

    def read(files: WeightFiles, name: str, index: Any = None) -> torch.Tensor:
        asked.append(name)
        return original(files, name, index)

    with PretrainedWeights(tmp_path, tiny_skeleton("mixtral")) as weights:
        monkeypatch.setattr(WeightFiles, "read", read)
        weights.read("model.layers.1.mlp.experts.gate_up_proj", (slice(3, 5), slice(0, 1)))
    prefix = "model.layers.1.block_sparse_moe.experts"
    assert set(asked) == {f"{prefix}.{e}.{w}.weight" for e in (3, 4) for w in ("w1", "w3")}


def test_only_the_wanted_slice_is_asked_of_the_file(
    tiny_model: Model, tiny_skeleton: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tiny_model("llama"), tmp_path)
    asked: list[Any] = []

    class Slice:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            return self._inner[index]

    class Handle:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def get_slice(self, name: str) -> Slice:
            return Slice(self._inner.get_slice(name))

        def __exit__(self, *exception: object) -> None:
            self._inner.__exit__(*exception)

    original = WeightFiles._open
    with PretrainedWeights(tmp_path, tiny_skeleton("llama")) as weights:
        monkeypatch.setattr(WeightFiles, "_open", lambda files, file: Handle(original(files, file)))
        weights.read("model.embed_tokens.weight", (slice(8, 16),))
    assert asked == [(slice(8, 16), slice(0, 32))]


def test_empty_slices_are_empty(tiny_model: Model, tiny_skeleton: Model, tmp_path: Path) -> None:
    saved(tiny_model("mixtral"), tmp_path)
    with PretrainedWeights(tmp_path, tiny_skeleton("mixtral")) as weights:
        assert weights.read("model.layers.0.mlp.experts.down_proj", (slice(5, 5),)).shape == (0, 32, 48)
        assert weights.read("lm_head.weight", (slice(96, 96), slice(0, 4))).shape == (0, 4)


def test_readers_give_slices_of_what_was_asked_for(tiny_model: Model, tiny_skeleton: Model, tmp_path: Path) -> None:
    model = tiny_model("llama")
    saved(model, tmp_path, max_shard_size="20KB")
    wanted = {"lm_head.weight", "model.layers.1.mlp.up_proj.weight"}
    with PretrainedWeights(tmp_path, tiny_skeleton("llama")) as weights:
        readers = dict(weights.readers(wanted))
        assert readers.keys() == wanted
        for name, read in readers.items():
            assert torch.equal(read((slice(1, 3),)), model.get_parameter(name)[1:3])


def test_files_are_closed_at_the_end(tiny_model: Model, tiny_skeleton: Model, tmp_path: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    saved(tiny_model("llama"), tmp_path, max_shard_size="20KB")
    weights = PretrainedWeights(tmp_path, tiny_skeleton("llama"))
    assert str(tmp_path) not in maps.read_text(), "a file is open before anything was read"
    kept = weights.read("lm_head.weight")
    assert maps.read_text().count(str(tmp_path)) >= 1
    weights.close()
    assert str(tmp_path) not in maps.read_text()
    assert torch.equal(kept, weights.read("lm_head.weight"))
    weights.close()


def test_a_missing_folder_or_file_is_named(tiny_skeleton: Model, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"model\.safetensors") as caught:
        PretrainedWeights(tmp_path / "nowhere", tiny_skeleton("llama"))
    assert "nowhere" in str(caught.value)


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "another file"])
def test_a_damaged_shard_is_named(damage: str, tiny_model: Model, tiny_skeleton: Model, tmp_path: Path) -> None:
    saved(tiny_model("llama"), tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    shard, content = shards[1], shards[1].read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes({"truncated": content[:-8], "empty": b"", "another file": shards[0].read_bytes()}[damage])
    with pytest.raises(WeightsError, match=shard.name):
        PretrainedWeights(tmp_path, tiny_skeleton("llama"))


def test_a_broken_index_is_named(tiny_skeleton: Model, tmp_path: Path) -> None:
    (tmp_path / weight_files.INDEX_NAME).write_text("{", encoding="utf-8")
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        PretrainedWeights(tmp_path, tiny_skeleton("llama"))


def test_a_parameter_without_a_source_is_an_error_unless_allowed(
    tiny_model: Model, tiny_skeleton: Model, tmp_path: Path
) -> None:
    saved(tiny_model("llama"), tmp_path)
    lost = "model.layers.1.self_attn.q_proj.weight"

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.query.weight"] = tensors.pop(lost)

    rewrite(tmp_path, lose)
    with pytest.raises(WeightsError, match=lost) as caught:
        PretrainedWeights(tmp_path, tiny_skeleton("llama"))
    assert "model.layers.1.self_attn.query.weight" in caught.value.hint
    with PretrainedWeights(tmp_path, tiny_skeleton("llama"), allow_missing=["*.q_proj.weight"]) as weights:
        assert weights.missing() == [lost]
        assert lost not in weights.names()
        assert weights.unexpected() == ["model.layers.1.self_attn.query.weight"]


def test_buffers_that_older_checkpoints_saved_are_not_unexpected(
    tiny_model: Model, tiny_skeleton: Model, tmp_path: Path
) -> None:
    saved(tiny_model("llama"), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    with PretrainedWeights(tmp_path, tiny_skeleton("llama")) as weights:
        assert weights.unexpected() == []


def test_a_wrong_shape_is_named(tiny_model: Model, tiny_skeleton: Model, tmp_path: Path) -> None:
    saved(tiny_model("llama"), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 32)}))
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*\[97, 32\].*\[96, 32\]"):
        PretrainedWeights(tmp_path, tiny_skeleton("llama"))


@pytest.mark.parametrize("lost", ["w1", "w2"])
def test_a_missing_expert_is_named(lost: str, tiny_model: Model, tiny_skeleton: Model, tmp_path: Path) -> None:
    saved(tiny_model("mixtral"), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(f"model.layers.0.block_sparse_moe.experts.2.{lost}.weight"))
    name = {"w1": "gate_up_proj", "w2": "down_proj"}[lost]
    with pytest.raises(WeightsError, match=rf"model\.layers\.0\.mlp\.experts\.{name}"):
        PretrainedWeights(tmp_path, tiny_skeleton("mixtral"))


def test_quantised_weights_are_refused(tiny_model: Model, tiny_skeleton: Model, tmp_path: Path) -> None:
    saved(tiny_model("llama"), tmp_path)

    def to_float8(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    rewrite(tmp_path, to_float8)
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*F8_E4M3"):
        PretrainedWeights(tmp_path, tiny_skeleton("llama"))
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) | {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(WeightsError, match=r"quantised \(fp8\)"):
        PretrainedWeights(tmp_path, tiny_skeleton("llama"))


bound = st.none() | st.integers(-7, 7)


@given(shape=st.lists(st.integers(0, 5), max_size=3), bounds=st.lists(st.tuples(bound, bound), max_size=3))
@settings(max_examples=100)
def test_a_full_index_means_the_same(shape: list[int], bounds: list[tuple[int | None, int | None]]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    index = tuple(slice(low, high) for low, high in bounds[: len(shape)])
    full = full_index(tuple(shape), index)
    assert torch.equal(tensor[full], tensor[index])
    assert all(0 <= one.start <= one.stop for one in full)
    assert len(full) == len(shape)


def test_an_index_that_does_not_fit_is_a_programming_error() -> None:
    with pytest.raises(IndexError):
        full_index((2,), (slice(None), slice(None)))
    with pytest.raises(IndexError):
        full_index((4,), (slice(0, 4, 2),))
