"""Plans: printed form parses back, contradictions and misspellings are named, derived values are right."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.config import apply_settings
from weft.core.errors import BadValueError, ConfigFileError, NotBuiltError, PlanError, UnknownKeyError
from weft.core.executable import require_executable
from weft.core.open_choices import require_mixture
from weft.core.plan import Pipeline, Plan
from weft.schedule import Kind, generate

degrees = st.sampled_from([1, 2, 4, 8])


@given(replicate=degrees, shard=degrees, zero=st.sampled_from([1, 2, 3]), microbatches=st.integers(1, 64))
def test_printed_form_parses_back(replicate: int, shard: int, zero: int, microbatches: int) -> None:
    plan = Plan.from_tables(
        {
            "mesh": {"dp_replicate": replicate, "dp_shard": shard},
            "data_parallel": {"zero": zero},
            "pipeline": {"microbatches": microbatches},
        }
    )
    assert Plan.from_tables(tomllib.loads(plan.to_toml())) == plan
    assert plan.num_ranks == replicate * shard == plan.mesh.dp_degree


def test_unknown_key_names_the_nearest_spelling() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        Plan.from_tables({"mesh": {"dp_shrad": 2}}, source="plan.toml")
    assert "dp_shrad" in caught.value.message
    assert "'dp_shard'" in caught.value.hint


def test_unknown_section_is_an_error() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        Plan.from_tables({"mseh": {}})
    assert "'mesh'" in caught.value.hint


def test_bad_value_names_key_and_choices() -> None:
    with pytest.raises(BadValueError) as caught:
        Plan.from_tables({"data_parallel": {"zero": 5}})
    assert "data_parallel.zero" in caught.value.message
    assert "FSDP" in caught.value.hint


def test_a_sharding_mesh_without_a_stage_is_zero_3_and_a_named_stage_is_kept() -> None:
    assert Plan.from_tables({"mesh": {"dp_shard": 2}}).data_parallel.zero == 3
    assert Plan.from_tables({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}}).data_parallel.zero == 1


@pytest.mark.parametrize(
    "tables",
    [
        {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 0}},
        {"data_parallel": {"strategy": "dataparallel", "zero": 2}},
        {"mesh": {"dp_shard": 3, "ep": 2}},
        {"mesh": {"tp": 2, "ep": 2}, "expert_parallel": {"tensor": "width"}},
        {"activations": {"policy": "full", "mixture": [2, 2]}},
        {"activations": {"mixture": [0, 0]}},
    ],
)
def test_contradictions_are_refused_with_a_hint(tables: dict[str, dict[str, object]]) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_tables(tables)
    assert caught.value.hint


@pytest.mark.parametrize(("tensor", "axes"), [("width", "dp_shard x cp = 3"), ("folded", "dp_shard x cp x tp = 9")])
def test_an_expert_degree_that_does_not_divide_names_the_axes(tensor: str, axes: str) -> None:
    with pytest.raises(PlanError, match=f"ep = 2 does not divide {axes}") as caught:
        Plan.from_tables({"mesh": {"dp_shard": 3, "tp": 3, "ep": 2}, "expert_parallel": {"tensor": tensor}})
    assert "raise mesh.dp_shard to a multiple of 2" in str(caught.value.hint)


@pytest.mark.parametrize(
    "tables",
    [
        {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "pipedream"}, "data_parallel": {"zero": 1}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream"}, "precision": {"preset": "fp16"}},
        {"mesh": {"pp": 2, "tp": 4}, "tensor_parallel": {"mode": "2d"}},
        {"activations": {"offload": "cpu"}},
        {"activations": {"policy": "full", "partition": True}},
        {"activations": {"policy": "budget", "mixture": [1, 1]}, "compile": {"enabled": True}},
        {"activations": {"policy": "budget"}, "data_parallel": {"strategy": "dataparallel"}},
        {"activations": {"policy": "full"}, "data_parallel": {"strategy": "dataparallel"}},
        {"offload": {"optimizer": "cpu", "durable": "step"}},
        {"offload": {"parameters": "cpu"}},
        {"offload": {"optimizer": "nvme", "parameters": "cpu"}},
        {"offload": {"optimizer": "nvme", "delayed": True}},
        {"offload": {"optimizer": "cpu", "parameters": "cpu", "delayed": True}},
        {"offload": {"optimizer": "cpu", "delayed": True}, "precision": {"preset": "fp16"}},
        {"offload": {"optimizer": "cpu", "folder": "states"}},
        {"offload": {"update": "host"}},
        {"offload": {"chunk_elements": 4096}},
        {"data_parallel": {"zero": 2, "bucket_bytes": 2**20}},
        {"offload": {"staging_bytes": 2**30}},
        {"offload": {"optimizer": "cpu", "update": "host", "staging_bytes": 2**30}},
        {"offload": {"optimizer": "cpu", "staging_bytes": 2**30}, "mesh": {"pp": 2}},
        {"offload": {"optimizer": "cpu"}, "data_parallel": {"strategy": "dataparallel"}},
        {"offload": {"optimizer": "cpu"}, "mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream"}},
        {"compile": {"enabled": True}, "mesh": {"tp": 2}},
        {"compile": {"enabled": True}, "mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}},
        {"float8": {"linears": "auto"}, "mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}},
        {"kernels": {"loss": "fused"}, "mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}},
        {"kernels": {"loss": "fused"}, "data_parallel": {"strategy": "dataparallel"}},
        {"float8": {"linears": "auto"}, "precision": {"preset": "fp16"}},
        *(
            {"precision": {"preset": "bf16", "residual": "float32"}, **beside}
            for beside in (
                {"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}},
                {"float8": {"linears": "all"}},
                {"compile": {"enabled": True}},
                {"activations": {"policy": "full", "offload": "cpu"}},
                {"data_parallel": {"strategy": "dataparallel"}},
                {"precision": {"preset": "fp16", "residual": "float32"}},
            )
        ),
        {"precision": {"preset": "bf16", "logits": "float32"}, "kernels": {"loss": "fused"}},
        {"precision": {"preset": "bf16", "gradients": "bfloat16"}, "offload": {"optimizer": "cpu"}},
        {"precision": {"reduce": "int8"}, "mesh": {"dp_replicate": 2}, "data_parallel": {"all_reduce": "ring"}},
        {
            "precision": {"reduce": "int8"},
            "mesh": {"dp_replicate": 2},
            "data_parallel": {"find_unused_parameters": True},
        },
        {"precision": {"reduce": "int8"}, "data_parallel": {"strategy": "dataparallel"}},
        {
            "precision": {"reduce": "int8"},
            "mesh": {"dp_replicate": 2, "tp": 4},
            "tensor_parallel": {"mode": "2d", "sequence_parallel": False},
        },
        {
            "precision": {"reduce": "bfloat16"},
            "mesh": {"dp_replicate": 2},
            "offload": {"optimizer": "cpu", "delayed": True},
        },
        {
            "precision": {"gather": "int8"},
            "mesh": {"dp_shard": 2},
            "offload": {"optimizer": "cpu", "parameters": "cpu"},
        },
        {
            "precision": {"gather": "int8"},
            "mesh": {"dp_shard": 2, "tp": 4},
            "tensor_parallel": {"mode": "2d", "sequence_parallel": False},
            "data_parallel": {"zero": 3},
        },
        *(
            {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3, "secondary_shard": 2}, **beside}
            for beside in (
                {"mesh": {"dp_shard": 4, "pp": 2}, "pipeline": {"microbatches": 2}},
                {"mesh": {"dp_shard": 4, "ep": 2}},
                {"offload": {"optimizer": "cpu", "parameters": "cpu"}},
                {"offload": {"optimizer": "cpu", "delayed": True}},
            )
        ),
        *(
            {"data_parallel": {"error_feedback": True}, "precision": {"reduce": "int8"}, **beside}
            for beside in (
                {
                    "mesh": {"dp_shard": 2, "pp": 2},
                    "data_parallel": {"zero": 2, "error_feedback": True},
                    "pipeline": {"microbatches": 4, "schedule": "zbv", "virtual_stages": 2},
                },
                {"mesh": {"dp_replicate": 2, "tp": 4}, "tensor_parallel": {"mode": "2d"}},
                {"mesh": {"dp_replicate": 2}, "precision": {"preset": "fp16", "reduce": "int8"}},
                {"mesh": {"dp_replicate": 2}, "offload": {"optimizer": "nvme"}},
            )
        ),
        {
            "precision": {"preset": "bf16", "optimizer_state": "bfloat16"},
            "mesh": {"pp": 2},
            "pipeline": {"schedule": "pipedream"},
        },
    ],
)
def test_what_is_not_built_is_refused_by_name(tables: dict[str, dict[str, object]]) -> None:
    with pytest.raises(NotBuiltError):
        require_executable(Plan.from_tables(tables))


@pytest.mark.parametrize(
    ("shards", "zero", "size", "words"),
    [
        (8, 2, 2, "is for data_parallel.zero = 3"),
        (8, 3, 3, "divide into groups of 2 or 4"),
        (8, 3, 8, "divide into groups of 2 or 4"),
        (8, 3, 1, "divide into groups of 2 or 4"),
        (2, 3, 2, "divide into no smaller groups"),
    ],
)
def test_a_secondary_shard_is_a_smaller_group_of_shards(shards: int, zero: int, size: int, words: str) -> None:
    tables = {"mesh": {"dp_shard": shards}, "data_parallel": {"zero": zero, "secondary_shard": size}}
    with pytest.raises(PlanError, match=words):
        Plan.from_tables(tables)


@pytest.mark.parametrize(
    ("cp", "attention", "size", "words"),
    [
        (8, "ring", 3, "divide into groups of 2 or 4"),
        (8, "gather", 8, "divide into groups of 2 or 4"),
        (2, "ring", 2, "divide into no smaller groups"),
        (8, "ulysses", 2, "exchanges heads among all ranks"),
    ],
)
def test_ranks_that_exchange_heads_are_a_part_of_the_context(cp: int, attention: str, size: int, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        Plan.from_tables({"mesh": {"cp": cp}, "context_parallel": {"attention": attention, "ulysses": size}})
    assert "remove context_parallel.ulysses" in str(caught.value.hint)


def test_groups_of_the_context_do_not_matter_without_one() -> None:
    plan = Plan.from_tables({"context_parallel": {"attention": "ring", "ulysses": 2}})
    assert plan.context_parallel.head_ranks(plan.mesh.cp) == 1


def test_error_feedback_needs_errors() -> None:
    with pytest.raises(PlanError, match=r"precision\.reduce is float32"):
        Plan.from_tables({"data_parallel": {"error_feedback": True}})


def test_everything_the_engine_has_is_executable() -> None:
    recomputed = [{"activations": {"policy": policy}} for policy in ("full", "selective", "budget")]
    recomputed += [{"activations": {"policy": "budget", "mixture": [2, 0]}, "compile": {"enabled": True}}]
    recomputed += [{"offload": {"optimizer": "cpu", "update": update}} for update in ("auto", "device", "host")]
    recomputed += [{"activations": {"policy": policy, "offload": "cpu"}} for policy in ("full", "budget")]
    whole = {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False}}
    recomputed += [{"activations": {"policy": "full", "partition": True}, **whole}]
    hsdp = {"dp_shard": 2, "dp_replicate": 2}
    meshes = [{"mesh": hsdp}, {"mesh": {"tp": 2}}, {"mesh": {"pp": 2, **hsdp}}]
    fused = [{"kernels": {"loss": "fused"}, "mesh": mesh} for mesh in ({"pp": 2, "tp": 2}, hsdp)]
    fast = [{"compile": {"enabled": True}, "mesh": {"pp": 2}}, {"float8": {"linears": "auto"}, "mesh": {"pp": 2}}]
    fast += [{"float8": {"linears": "auto"}, "mesh": {"pp": 2}, "pipeline": {"schedule": "dualpipev"}}]
    fast += [{"precision": {"preset": "deepseek-v3"}, "mesh": {"tp": 2}}]
    for tables in ({}, *meshes, *fused, *fast, {"precision": {"preset": "fp16"}}, *recomputed):
        require_executable(Plan.from_tables(tables))


def test_blocks_by_hand_are_written_back_and_left_out_where_absent() -> None:
    plan = Plan.from_tables({"mesh": {"pp": 4}, "pipeline": {"blocks": [5, 5, 5, 1]}})
    assert plan.pipeline.blocks == (5, 5, 5, 1)
    assert tomllib.loads(plan.to_toml())["pipeline"]["blocks"] == [5, 5, 5, 1]
    assert Plan.from_tables(tomllib.loads(plan.to_toml())) == plan
    assert plan.model_dump(mode="json", exclude_none=True)["pipeline"]["blocks"] == [5, 5, 5, 1]
    for tables in ({}, {"pipeline": {"blocks": []}}):  # [] takes the key back, from the command line too
        assert Plan.from_tables(tables).pipeline.blocks is None
        assert "blocks" not in tomllib.loads(Plan.from_tables(tables).to_toml())["pipeline"]


@pytest.mark.parametrize(
    ("mesh", "pipeline", "words"),
    [
        ({}, {"blocks": [2, 2]}, "mesh.pp is 1"),
        ({"pp": 4}, {"blocks": [5, 5, 6]}, "3 numbers, but pp x virtual_stages = 4 stages"),
        ({"pp": 2}, {"blocks": [8, 8], "virtual_stages": 2, "schedule": "zbv"}, "2 numbers, but pp x virtual_stages"),
    ],
)
def test_blocks_for_another_pipeline_are_refused(mesh: dict[str, int], pipeline: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_tables({"mesh": mesh, "pipeline": pipeline})
    assert words in caught.value.message
    assert "pipeline.blocks = []" in caught.value.hint


@pytest.mark.parametrize("blocks", [[4, 0], [4, -1], [4, 1.5], ["four", 4], [True, 4], 8, "even"])
def test_blocks_that_are_no_counts_are_refused(blocks: object) -> None:
    with pytest.raises(BadValueError) as caught:
        Plan.from_tables({"mesh": {"pp": 2}, "pipeline": {"blocks": blocks}})
    assert "pipeline.blocks" in caught.value.message
    assert "[5, 5, 5, 1]" in caught.value.hint


def test_files_that_are_missing_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError):
        Plan.from_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("mesh = [")
    with pytest.raises(ConfigFileError, match="not TOML"):
        Plan.from_file(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("a.b=1", 1),
        ("a.b=true", True),
        ("a.b=1e-3", 1e-3),
        ("a.b=word", "word"),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b='1'", "1"),
    ],
)
def test_settings_are_toml_literals_or_words(setting: str, expected: object) -> None:
    original: dict[str, dict[str, object]] = {"a": {"c": 0}}
    assert apply_settings(original, [setting]) == {"a": {"c": 0, "b": expected}}
    assert original == {"a": {"c": 0}}


@pytest.mark.parametrize("setting", ["a.b", "a=1", ".b=1", "a.c.d=1"])
def test_malformed_settings_are_refused(setting: str) -> None:
    with pytest.raises(BadValueError):
        apply_settings({"a": {"c": 0}}, [setting])


@pytest.mark.parametrize(
    ("tables", "preset"),
    [
        ({"float8": {"linears": "auto"}}, "bf16"),
        ({"precision": {"optimizer_state": "bfloat16"}}, "bf16"),
        ({"precision": {"master_weights": "bfloat16"}}, "bf16"),
        ({"float8": {"linears": "auto"}, "precision": {"preset": "fp32"}}, "fp32"),
        ({"float8": {"linears": "none"}}, "fp32"),
    ],
)
def test_low_parts_mean_bf16_unless_a_preset_is_named(tables: dict[str, dict[str, object]], preset: str) -> None:
    assert Plan.from_tables(tables).precision.preset == preset


@pytest.mark.parametrize("mixture", [[1], [1, 2, 3], [-1, 2], [1.5, 2], [True, 1], "2", 3])
def test_a_mixture_is_two_counts(mixture: object) -> None:
    with pytest.raises(BadValueError, match=r"activations\.mixture") as caught:
        Plan.from_tables({"activations": {"policy": "budget", "mixture": mixture}})
    assert "fully, selectively" in caught.value.hint


def test_a_mixture_is_printed_and_an_empty_one_is_open() -> None:
    plan = Plan.from_tables({"activations": {"policy": "budget", "mixture": [2, 3]}})
    assert Plan.from_tables(tomllib.loads(plan.to_toml())) == plan
    assert not plan.activations.is_open
    assert Plan.from_tables({"activations": {"policy": "budget", "mixture": []}}).activations.is_open


def test_a_mixture_is_for_the_blocks_there_are() -> None:
    plan = Plan.from_tables({"activations": {"policy": "budget", "mixture": [2, 3]}})
    require_mixture(plan, num_blocks=5)
    with pytest.raises(PlanError, match="is 5 blocks, but the model has 4") as caught:
        require_mixture(plan, num_blocks=4)
    assert "at most 4" in caught.value.hint
    with pytest.raises(PlanError, match=r"has no activations\.mixture"):
        require_mixture(Plan.from_tables({"activations": {"policy": "budget"}}), num_blocks=4)


@pytest.mark.parametrize("name", sorted(get_args(Pipeline.model_fields["schedule"].annotation)))
def test_which_schedules_split_backwards_is_said_as_they_do(name: str) -> None:
    stages = 2 if name in ("interleaved_1f1b", "looped_bfs", "zbv", "dualpipev") else 1
    schedule = generate(name, num_ranks=2, num_microbatches=4, virtual_stages=stages)
    has_halves = any(action.kind is Kind.I for actions in schedule.ranks for action in actions)
    assert Pipeline(schedule=name).splits_backwards == has_halves  # type: ignore[arg-type]
