"""From options to a run and the tables of a plan: files, then settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.resolve import plan_tables, require_known_sections, resolve_resumed, resolve_run
from weft.core.errors import BadValueError, ConfigFileError, MeshError, UnknownKeyError
from weft.core.plan import Plan
from weft.core.run_spec import DEFAULT_RUN, RunSpec
from weft.plan.resolve import resolve


def test_settings_go_into_the_document_they_belong_to(tmp_path: Path) -> None:
    settings = ["train.steps=7", "data_parallel.zero=2", "model.config.hidden_size=64", "data.tokenizer=bytes"]
    run = resolve_run(None, settings)
    assert run.train.steps == 7
    assert run.model.config["hidden_size"] == 64
    assert run.model.config["num_hidden_layers"] == 6  # the rest of the embedded default stays
    assert DEFAULT_RUN["train"]["steps"] == 200  # and is not written into
    assert plan_tables(None, settings) == {"data_parallel": {"zero": 2}}


def saved(folder: Path, plan: Plan) -> Path:
    (folder / "run.toml").write_text(RunSpec.default().to_toml())
    (folder / "plan.toml").write_text(plan.to_toml())
    return folder


SHARDED = Plan.from_tables({"mesh": {"dp_shard": 2}, "precision": {"preset": "bf16"}})


def test_a_resume_goes_on_as_the_folder_has_it(tmp_path: Path) -> None:
    run, tables = resolve_resumed(saved(tmp_path, SHARDED), None, ["train.steps=300"], num_ranks=None)
    assert run.train.steps == 300
    assert Plan.from_tables(tables) == SHARDED


@pytest.mark.parametrize(
    ("settings", "num_ranks", "expected"),
    [
        ([], 2, {"dp_shard": 2}),
        ([], 4, {"dp_shard": 4}),  # another number of ranks drops the old mesh, the stage stays
        ([], 1, {"dp_shard": 1}),
        (["data_parallel.zero=0"], 4, {"dp_replicate": 4}),
        (["mesh.dp_replicate=2"], 2, {"dp_replicate": 2, "dp_shard": 1}),  # a mesh that is given replaces the old one
        (["mesh.dp_shard=2", "mesh.dp_replicate=2"], 4, {"dp_shard": 2, "dp_replicate": 2}),
    ],
)
def test_a_resume_on_another_layout(
    tmp_path: Path, settings: list[str], num_ranks: int, expected: dict[str, int]
) -> None:
    run, tables = resolve_resumed(saved(tmp_path, SHARDED), None, settings, num_ranks=num_ranks)
    plan = resolve(tables, run, on_gpu=False, num_ranks=num_ranks)
    assert {axis: plan.mesh.sizes()[axis] for axis in expected} == expected
    assert plan.precision.preset == "bf16"


def test_a_resume_with_a_plan_of_its_own_or_without_a_mesh(tmp_path: Path) -> None:
    folder = saved(tmp_path, SHARDED)
    other = tmp_path / "other.toml"
    other.write_text("[mesh]\ndp_replicate = 3\n")
    assert resolve_resumed(folder, other, [], num_ranks=None)[1] == {"mesh": {"dp_replicate": 3}}
    (folder / "plan.toml").write_text("[data_parallel]\nzero = 3\n")  # written by hand
    run, tables = resolve_resumed(folder, None, [], num_ranks=2)
    assert resolve(tables, run, on_gpu=False, num_ranks=2).mesh.dp_shard == 2
    run, tables = resolve_resumed(folder, None, ["mesh.dp_shard=3"], num_ranks=2)
    with pytest.raises(MeshError, match=r"3 ranks .* but 2"):
        resolve(tables, run, on_gpu=False, num_ranks=2)


def test_misspellings_are_named() -> None:
    with pytest.raises(UnknownKeyError, match="'trian'") as caught:
        require_known_sections(["trian.steps=3"])
    assert "'train'" in caught.value.hint
    require_known_sections(["train.steps=3", "mesh.dp_shard=2"])
    with pytest.raises(BadValueError, match=r"not section\.key=value"):
        resolve_run(None, ["train.steps"])
    with pytest.raises(BadValueError, match=r"not section\.key=value"):
        plan_tables(None, ["zero"])
    with pytest.raises(ConfigFileError, match="there is no file"):
        resolve_run(Path("nowhere.toml"), [])
