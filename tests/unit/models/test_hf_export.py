"""What is exported is what transformers itself would have saved, and loads with bitwise equal logits."""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from weft.core.errors import RunFolderError, TokenizerError, WeightsError
from weft.models import hf_export
from weft.models.hf_export import export_folder

Model = Callable[[str], Any]
Stored = Callable[[Path], dict[str, torch.Tensor]]


def own_tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under the model's own names, each once, in a fixed shuffled order."""
    saved = model.state_dict()
    tensors = list(model.named_parameters()) + [pair for pair in model.named_buffers() if pair[0] in saved]
    random.Random(0).shuffle(tensors)
    return tensors


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(3, 27).reshape(2, 12)
    return model(input_ids=tokens).logits


def loaded(folder: Path) -> Any:
    """The folder as transformers loads it, which must be without a complaint."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


def test_an_export_loads_with_equal_logits(case: str, tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model(case)
    files = export_folder(model.config, iter(own_tensors(model)), tmp_path / "out", max_shard_bytes=30_000)
    assert sum(file.suffix == ".safetensors" for file in files) > 1
    again = loaded(tmp_path / "out")
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(model))
    assert torch.isfinite(logits(model)).all()


def test_an_export_stores_what_save_pretrained_stores(
    case: str, tiny_model: Model, tmp_path: Path, stored_in: Stored
) -> None:
    model = tiny_model(case)
    export_folder(model.config, own_tensors(model), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = stored_in(tmp_path / "ours"), stored_in(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    assert {file.name for file in (tmp_path / "ours").iterdir()} == {
        file.name for file in (tmp_path / "theirs").iterdir()
    }


@pytest.mark.parametrize("moe", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_the_models_own_names_load_too(
    moe: str, tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored_in: Stored
) -> None:
    monkeypatch.setattr(hf_export.SavePlan, "build", lambda model, names: None)
    model = tiny_model(moe)
    export_folder(model.config, own_tensors(model), tmp_path / "out")
    assert any(name.endswith("experts.gate_up_proj") for name in stored_in(tmp_path / "out"))
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


def test_experts_are_stored_one_by_one_as_on_the_hub(tiny_model: Model, tmp_path: Path, stored_in: Stored) -> None:
    model = tiny_model("mixtral")
    export_folder(model.config, own_tensors(model), tmp_path / "out")
    stored = stored_in(tmp_path / "out")
    fused = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    assert torch.equal(stored["model.layers.1.block_sparse_moe.experts.3.w2.weight"], fused[3])


def test_a_tied_weight_is_stored_once_whatever_names_it_comes_under(
    tiny_model: Model, tmp_path: Path, stored_in: Stored
) -> None:
    model = tiny_model("qwen3-tied")
    every_name = list(model.state_dict().items())
    only_the_other = [(name, value) for name, value in every_name if name != "model.embed_tokens.weight"]
    for number, tensors in enumerate([every_name, every_name[::-1], only_the_other]):
        out = tmp_path / str(number)
        export_folder(model.config, tensors, out)
        assert "model.embed_tokens.weight" in stored_in(out)
        assert "lm_head.weight" not in stored_in(out)
        assert torch.equal(logits(loaded(out)), logits(model))


def test_a_cast_is_written_into_the_config_and_spares_what_must_stay_float32(
    tiny_model: Model, tmp_path: Path, stored_in: Stored
) -> None:
    model = tiny_model("deepseek_v3")
    export_folder(model.config, own_tensors(model), tmp_path / "out", dtype=torch.bfloat16)
    again = loaded(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert model.config.dtype != "bfloat16", "the caller's config was changed"
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    for name, value in stored_in(tmp_path / "out").items():
        assert value.dtype == (torch.float32 if name == bias else torch.bfloat16), name
    assert torch.equal(again.state_dict()[bias], model.state_dict()[bias])
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))


def test_without_a_cast_the_config_says_what_was_given(tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    export_folder(model.config, own_tensors(model), tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert (fields["dtype"], fields["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    for name, value in loaded(tmp_path / "out").state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, model.state_dict()[name]), name


def test_shards_respect_their_size_and_the_index_tells_where_all_is(tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("llama")
    export_folder(model.config, own_tensors(model), tmp_path / "out", max_shard_bytes=10_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(value.nbytes for _, value in own_tensors(model))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    for file in files:
        with safe_open(file, framework="pt") as handle:
            held = {name: handle.get_tensor(name).nbytes for name in handle.keys()}  # noqa: SIM118
            assert handle.metadata() == {"format": "pt"}
        assert {name for name, where in index["weight_map"].items() if where == file.name} == held.keys()
        assert len(held) == 1 or sum(held.values()) <= 10_000


def test_no_more_than_a_shard_is_held(tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = own_tensors(model)
    largest, total = max(value.nbytes for _, value in tensors), sum(value.nbytes for _, value in tensors)
    alive, peak = 0, 0

    def freed(num_bytes: int) -> None:
        nonlocal alive
        alive -= num_bytes

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, peak
        for name, value in tensors:
            memory = value.detach().numpy().copy()  # lives as long as any tensor made of it
            alive += memory.nbytes
            peak = max(peak, alive)
            weakref.finalize(memory, freed, memory.nbytes)
            fresh = torch.from_numpy(memory)
            del memory
            yield name, fresh

    export_folder(model.config, one_by_one(), tmp_path / "out", max_shard_bytes=20_000)
    assert 20_000 < peak <= 20_000 + largest < total / 2


def test_a_tensor_may_be_a_view(tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("llama")
    views = [(name, value.t().contiguous().t() if value.ndim == 2 else value) for name, value in own_tensors(model)]
    export_folder(model.config, views, tmp_path / "out")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))


def test_an_existing_export_is_never_overwritten(tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("llama")
    (tmp_path / "out").mkdir()
    export_folder(model.config, own_tensors(model), tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(RunFolderError, match="not empty"):
        export_folder(model.config, own_tensors(model), tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="is a file"):
        export_folder(model.config, own_tensors(model), tmp_path / "file")


def test_a_failed_export_leaves_nothing_behind(tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("llama")

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from own_tensors(model)[:-1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_folder(model.config, breaks(), tmp_path / "out", max_shard_bytes=10_000)
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_or_foreign_set_of_tensors_is_refused(tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = dict(own_tensors(model))
    lost = {name: value for name, value in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        export_folder(model.config, lost.items(), tmp_path / "out")
    with pytest.raises(WeightsError, match=r"model\.extra"):
        export_folder(model.config, [*tensors.items(), ("model.extra", torch.ones(1))], tmp_path / "out")
    shard = tensors | {"lm_head.weight": model.lm_head.weight[:48]}
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*\[48, 32\]"):
        export_folder(model.config, shard.items(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_comes_along(tiny_model: Model, tmp_path: Path) -> None:
    model, source = tiny_model("llama"), tmp_path / "source"
    source.mkdir()
    with pytest.raises(TokenizerError, match="source"):
        export_folder(model.config, own_tensors(model), tmp_path / "out", tokenizer=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (source / name).write_text(name, encoding="utf-8")
    files = export_folder(model.config, own_tensors(model), tmp_path / "out", tokenizer=source)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in files}
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(model))
