"""A hub name means its files in the cache; without a network one sentence says that they are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_cache import COMMIT, put_in_cache, use_cache

from weft.core.errors import ModelError, WeightsError
from weft.core.run_spec import RunSpec
from weft.plan.ask import resolve_model
from weft.zoo.hub import model_folder, with_model_files

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
CONFIG = {"model_type": "llama", "vocab_size": 300, **SIZES}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_cache(tmp_path / "hub", monkeypatch)
    return tmp_path / "hub"


def run_of(**model: str) -> RunSpec:
    return RunSpec.from_tables({"model": model})


def test_a_name_in_the_cache_is_its_snapshot_and_the_run_records_the_commit(files: Path, hub: Path) -> None:
    (files / "model.safetensors").touch()
    snapshot = put_in_cache(hub, "me/tiny", files)
    assert model_folder("me/tiny", weights=True) == snapshot
    assert with_model_files(run_of(path="me/tiny")).model.revision == COMMIT


def test_a_revision_is_looked_up_by_its_name(files: Path, hub: Path) -> None:
    put_in_cache(hub, "me/tiny", files, commit="a" * 40)
    second = put_in_cache(hub, "me/tiny", files, commit="b" * 40, revision="v2")
    assert model_folder("me/tiny", revision="v2") == second
    assert model_folder("me/tiny", revision="b" * 40) == second


@pytest.mark.parametrize("name", ["me/tiny", "tiny"])
def test_a_name_that_is_nowhere_is_one_sentence(
    name: str, hub: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelError, match=f"{name} is no folder, is not in the Hugging Face cache") as caught:
        with_model_files(run_of(path=name))
    assert "hf download" in caught.value.hint
    assert not caplog.records  # the library logs every retry
    assert capfd.readouterr().err == ""


def test_what_is_no_name_is_refused(hub: Path) -> None:
    with pytest.raises(ModelError, match="neither a folder nor a hub name"):
        model_folder("not a name")
    with pytest.raises(ModelError, match=r"no config\.json in some/where/else"):
        model_folder("some/where/else")


@pytest.mark.parametrize("weights", ["auto", "pretrained"])
@pytest.mark.parametrize("is_hub", [True, False])
def test_a_path_without_weights_is_refused_unless_random_ones_are_asked_for(
    weights: str, is_hub: bool, files: Path, hub: Path
) -> None:
    path = "me/tiny" if is_hub else str(files)
    put_in_cache(hub, "me/tiny", files)
    with pytest.raises(WeightsError, match=f"{path} has no model.safetensors") as caught:
        with_model_files(run_of(path=path, weights=weights))
    assert 'model.weights = "random"' in caught.value.hint
    with_model_files(run_of(path=path, weights="random"))


def test_weights_in_another_format_are_named(files: Path) -> None:
    (files / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"it has pytorch_model\.bin") as caught:
        with_model_files(run_of(path=str(files)))
    assert "save_pretrained" in caught.value.hint


def test_planning_takes_the_cached_config_and_the_overrides(files: Path, hub: Path) -> None:
    put_in_cache(hub, "me/tiny", files)
    for path in ("me/tiny", str(files)):
        plain, _ = resolve_model(run_of(path=path))
        deeper, _ = resolve_model(RunSpec.from_tables({"model": {"path": path, "config": {"num_hidden_layers": 3}}}))
        assert deeper.num_parameters > plain.num_parameters
    assert resolve_model("me/tiny")[0].hidden_size == 64
    with pytest.raises(ModelError, match="not in the Hugging Face cache"):
        resolve_model(RunSpec.from_tables({"model": {"path": "me/other", "config": {"num_hidden_layers": 3}}}))
