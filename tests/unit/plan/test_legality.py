"""The table of legality rules: what it refuses, with numbers that would do; the planner is never laxer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import request_of, tiny_llama

from weft.core.errors import BatchError, MeshError, NotBuiltError, WeftError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.legality import RULES, broken_rules, is_legal, require_legal
from weft.plan.plan_rows import columns_of
from weft.plan.rules import check_plan
from weft.schedule import NAMES


def run(
    global_batch: int, sequence_length: int = 64, router: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> RunSpec:
    return RunSpec.from_tables(
        {
            "router": router or {},
            "data": {"sequence_length": sequence_length},
            "model": {"type": "llama"},
            **sections,
            "train": {"global_batch": global_batch, **sections.get("train", {})},
        }
    )


def plan(replicas: int, microbatches: int) -> Plan:
    return Plan.from_tables({"mesh": {"dp_replicate": replicas}, "pipeline": {"microbatches": microbatches}})


@given(rows=st.integers(1, 8), replicas=st.integers(1, 8), microbatches=st.integers(1, 8))
def test_even_cuts_pass(rows: int, replicas: int, microbatches: int) -> None:
    require_legal(plan(replicas, microbatches), run(rows * replicas * microbatches))


@pytest.mark.parametrize(("global_batch", "hint"), [(10, "8 or 16"), (3, "to 8,")])
def test_uneven_ones_name_the_neighbours(global_batch: int, hint: str) -> None:
    with pytest.raises(BatchError, match=f"global batch of {global_batch}") as caught:
        require_legal(plan(2, 4), run(global_batch))
    assert hint in caught.value.hint


@pytest.mark.parametrize(("mode", "tp", "rows"), [("2d", 4, 2), ("2.5d", 8, 4), ("3d", 8, 4)])
def test_a_grid_deals_out_rows_too(mode: str, tp: int, rows: int) -> None:
    tables: dict[str, Any] = {"mesh": {"tp": tp}, "tensor_parallel": {"mode": mode}}
    require_legal(Plan.from_tables(tables), run(rows))
    with pytest.raises(BatchError, match=f"{rows} rows of the {mode} grid"):
        require_legal(Plan.from_tables(tables), run(rows // 2))


@pytest.mark.parametrize(
    ("cp", "policy", "hint"),
    [
        (8, {"attention": "ulysses"}, "set context_parallel.attention = 'gather' and context_parallel.ulysses = 4"),
        (6, {"attention": "ring", "ulysses": 3}, "set context_parallel.ulysses = 2"),
        (3, {"attention": "ulysses"}, "set context_parallel.attention = 'gather' and context_parallel.ulysses = 1"),
    ],
)
def test_heads_that_do_not_divide_get_the_largest_groups_that_do(cp: int, policy: dict[str, Any], hint: str) -> None:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    layout = Plan.from_tables({"mesh": {"cp": cp}, "context_parallel": policy})
    with pytest.raises(WeftError, match="4 heads do not divide") as caught:
        require_legal(layout, run(1, 48, model={"type": "llama", "config": small}))
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("length", "tp", "hint"), [(64, 1, None), (66, 1, "68 or 64"), (3, 1, "4"), (68, 2, None), (68, 4, "72 or 64")]
)
def test_a_mixture_with_context_parallel_has_no_padding(length: int, tp: int, hint: str | None) -> None:
    """The router would count filled positions as load, and `router.capacity_factor` would give them places."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    mixture = {"type": "mixtral", "config": {**small, "num_local_experts": 4}}
    layout = Plan.from_tables({"mesh": {"cp": 2, "tp": tp}, "tensor_parallel": {"sequence_parallel": True}})
    found = run(8, length, model=mixture)
    if hint is None:
        require_legal(layout, found)
        return
    with pytest.raises(MeshError, match="a mixture would route padding") as caught:
        require_legal(layout, found)
    assert caught.value.hint.endswith(f"data.sequence_length = {hint}")
    require_legal(layout, run(8, length, model={"type": "llama", "config": small}))  # they have no weight there


def test_a_sequence_that_ranks_cannot_share_is_refused_where_they_would_share_it() -> None:
    with pytest.raises(BatchError, match="a sequence of 30") as caught:
        require_legal(Plan.from_tables({"mesh": {"tp": 4}}), run(1, 30))
    assert "28 or 32" in caught.value.hint
    require_legal(Plan.from_tables({"mesh": {"tp": 4}, "tensor_parallel": {"sequence_parallel": False}}), run(1, 30))


@pytest.mark.parametrize(
    ("rule", "tables", "rows", "length"),
    [
        ("consistent", {"pipeline": {"vertical_sync": True}}, 1, 64),
        ("executable", {"mesh": {"tp": 2}, "compile": {"enabled": True}}, 1, 64),
        ("context", {"mesh": {"cp": 3}, "context_parallel": {"attention": "ulysses"}}, 1, 64),
        ("context", {"mesh": {"cp": 6}, "context_parallel": {"attention": "ring", "ulysses": 3}}, 1, 72),
        ("schedule", {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv"}}, 1, 64),
        ("batch", {"pipeline": {"microbatches": 2}}, 1, 64),
        ("sequence", {"mesh": {"tp": 2}}, 1, 63),
        ("experts", {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 1}}, 2, 64),
    ],
)
def test_each_rule_has_a_plan_that_it_alone_refuses(rule: str, tables: dict[str, Any], rows: int, length: int) -> None:
    given_plan, given_run = Plan.model_validate(tables), run(rows, length)
    refusing = [one.name for one in RULES if list(one.reasons(given_plan, given_run))]
    assert refusing == [rule]
    errors = list(broken_rules(given_plan, given_run))
    assert all(error.message and error.hint for error in errors)
    assert not is_legal(given_plan, given_run)


@pytest.mark.parametrize(
    ("rule", "sections", "tables"),
    [
        ("optimizer", {"train": {"optimizer": "muon"}}, {"offload": {"optimizer": "cpu"}}),
        ("optimizer", {"train": {"ema_decay": 0.9}}, {"offload": {"optimizer": "cpu"}}),
        (
            "adapter",
            {"adapter": {"kind": "lora"}},
            {"precision": {"preset": "bf16"}, "float8": {"linears": "all"}},
        ),
        ("adapter", {"adapter": {"kind": "lora", "dropout": 0.1}}, {"mesh": {"tp": 2}}),
        ("bad steps", {"train": {"on_bad_step": "skip"}}, {"offload": {"optimizer": "cpu", "delayed": True}}),
        ("samples", {"samples": {"every": 1, "prompts": ["a"]}}, {"mesh": {"pp": 2}}),
        ("positions", {"model": {"type": "gpt2", "config": {"n_positions": 16}}}, {}),
        ("chunks", {"model": {"type": "opt"}}, {"activations": {"sequence_chunk": 8}}),
        ("router of model", {"router": {"z_loss": 0.1}}, {}),
        ("isolation", {"model": {"type": "opt"}, "data": {"sequence_length": 64, "packing": "documents"}}, {}),
        ("tensor", {"model": {"type": "llama", "config": {"num_attention_heads": 1}}}, {"mesh": {"tp": 2}}),
        ("stages", {"model": {"type": "llama", "config": {"num_hidden_layers": 1}}}, {"mesh": {"pp": 2}}),
        (
            "blocks",
            {"model": {"type": "llama", "config": {"num_hidden_layers": 1}}},
            {"activations": {"policy": "budget", "mixture": [1, 1]}},
        ),
        (
            "samples",
            {"samples": {"every": 1, "prompts": ["a"]}},
            {"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}},
        ),
    ],
)
def test_a_layout_that_cannot_train_what_the_run_asks_is_refused(
    rule: str, sections: dict[str, Any], tables: dict[str, Any]
) -> None:
    given_plan, given_run = Plan.from_tables(tables), run(8, **sections)
    assert [one.name for one in RULES if list(one.reasons(given_plan, given_run))] == [rule]
    assert not list(broken_rules(given_plan, run(8)))


def test_a_ring_is_refused_for_soft_caps_before_ranks_start() -> None:
    plan = Plan.from_tables({"mesh": {"cp": 2}, "context_parallel": {"attention": "ring"}})
    require_legal(plan, run(1))
    with pytest.raises(MeshError, match=r"Gemma2Attention.*softcap = 50.0") as caught:
        require_legal(plan, run(1, model={"type": "gemma2"}))
    assert caught.value.hint == "set context_parallel.attention = 'gather'"


def test_each_rule_of_the_table_is_tried() -> None:
    names = {
        "consistent",
        "executable",
        "schedule",
        "batch",
        "sequence",
        "router",
        "experts",
        "context",
        "offload",
        "copies",
        "adapter",
        "optimizer",
        "bad steps",
        "samples",
    } | {"objective", "positions", "chunks", "router of model", "isolation", "tensor", "stages", "blocks"}
    assert {one.name for one in RULES} == names


@pytest.mark.parametrize(
    ("router", "tables", "words", "hint"),
    [
        ({"capacity_factor": 1.0}, {"mesh": {"tp": 2}}, "tokens of full sequences", "sequence_parallel = false"),
        (
            {},
            {"mesh": {"tp": 2}, "expert_parallel": {"capacity_factor": 1.0}},
            "tokens of full sequences",
            "sequence_parallel = false",
        ),
        (
            {"capacity_factor": 1.0},
            {"expert_parallel": {"capacity_factor": 1.25}},
            "of the plan is 1.25, but router.capacity_factor of the run is 1",
            "leave one of the two out",
        ),
        (
            {"z_loss": 0.1},
            {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}},
            "an update at the end of its step",
            "1f1b",
        ),
    ],
)
def test_a_layout_that_cannot_do_what_router_asks_is_refused(
    router: dict[str, Any], tables: dict[str, Any], words: str, hint: str
) -> None:
    given_plan, given_run = Plan.from_tables(tables), run(8, router=router, model={"type": "mixtral"})
    assert [one.name for one in RULES if list(one.reasons(given_plan, given_run))] == ["router"]
    with pytest.raises(NotBuiltError, match=words) as refused:
        require_legal(given_plan, given_run)
    assert hint in refused.value.hint
    require_legal(given_plan.model_copy(update={"expert_parallel": Plan().expert_parallel}), run(8))


@pytest.mark.parametrize(
    ("mesh", "hint"), [({"cp": 2}, "set mesh.cp = 1"), ({"tp": 2}, "set tensor_parallel.sequence_parallel = false")]
)
@pytest.mark.parametrize("router", [{"capacity_factor": 1.0}, {"balance_loss": 0.1, "balance_over": "transformers"}])
def test_the_hint_names_what_slices_the_sequence(mesh: dict[str, int], hint: str, router: dict[str, Any]) -> None:
    asked = run(8, model={"type": "mixtral"}, router=router)
    with pytest.raises(NotBuiltError, match="a rank has a slice") as refused:
        require_legal(Plan.from_tables({"mesh": mesh}), asked)
    assert refused.value.hint.startswith(f"{hint}, or router.")


def test_8_bit_moments_are_refused_where_rows_are_sharded() -> None:
    eight_bit = run(8, train={"optimizer": "adamw8bit"})
    with pytest.raises(NotBuiltError, match="8-bit moments need full rows") as refused:
        require_legal(Plan.from_tables({"mesh": {"tp": 2}}), eight_bit)
    assert "mesh.tp = 1" in refused.value.hint


@pytest.mark.parametrize(
    "tables",
    [
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}},
        {"offload": {"optimizer": "nvme"}},
    ],
)
def test_a_state_that_does_not_end_with_its_step_is_not_copied(tables: dict[str, Any]) -> None:
    rule = next(one for one in RULES if one.name == "copies")
    model = {"model": {"type": "llama"}}
    asked = RunSpec.from_tables({**model, "checkpoint": {"memory_every": 1}})
    assert [hint for _, hint in rule.reasons(Plan.from_tables(tables), asked) if "memory_every = 0" in hint]
    assert not list(rule.reasons(Plan.from_tables(tables), RunSpec.from_tables(model)))
    assert not list(rule.reasons(Plan(), asked))


def test_8_bit_states_on_the_host_are_legal() -> None:
    eight_bit = RunSpec.from_tables({"model": {"type": "llama"}, "train": {"optimizer": "adamw8bit"}})
    require_legal(Plan.from_tables({"offload": {"optimizer": "cpu", "update": "device"}}), eight_bit)


@pytest.mark.parametrize(
    "keys", [{"optimizer": "nvme"}, {"optimizer": "cpu", "masters": "host"}, {"optimizer": "cpu", "parameters": "cpu"}]
)
def test_8_bit_states_leave_alone(keys: dict[str, Any]) -> None:
    eight_bit = RunSpec.from_tables({"model": {"type": "llama"}, "train": {"optimizer": "adamw8bit"}})
    plan = Plan.from_tables({"precision": {"preset": "bf16"}, "offload": keys})
    rule = next(one for one in RULES if one.name == "offload")
    assert [hint for _, hint in rule.reasons(plan, eight_bit) if "offload.optimizer = 'cpu' alone" in hint]
    assert not list(rule.reasons(plan, RunSpec.from_tables({"model": {"type": "llama"}})))


@given(
    mesh=st.fixed_dictionaries(
        {axis: st.integers(1, most) for axis, most in {"dp_replicate": 2, "dp_shard": 2, "tp": 3, "pp": 3}.items()}
    ),
    microbatches=st.integers(1, 6),
    schedule=st.sampled_from(NAMES),
    stages=st.integers(1, 2),
    rows=st.integers(1, 24),
    length=st.integers(60, 64),
    is_sequence_parallel=st.booleans(),
)
def test_what_the_planner_allows_the_table_allows(
    mesh: dict[str, int],
    microbatches: int,
    schedule: str,
    stages: int,
    rows: int,
    length: int,
    is_sequence_parallel: bool,
) -> None:
    """The planner's rules over columns may be stricter, never laxer: a plan that it offers must start."""
    tables: dict[str, Any] = {
        "mesh": mesh,
        "data_parallel": {"zero": 1 if mesh["dp_shard"] > 1 else 0},
        "tensor_parallel": {"sequence_parallel": is_sequence_parallel},
        "pipeline": {"schedule": schedule, "virtual_stages": stages, "microbatches": microbatches},
    }
    drawn, shape = Plan.from_tables(tables), tiny_llama(num_hidden_layers=12)
    request = request_of(shape, f"{drawn.num_ranks}xCPU", global_batch=rows, sequence_length=length)
    if not check_plan(request, columns_of([drawn])):
        broken = [error for error in broken_rules(drawn, run(rows, length)) if not isinstance(error, NotBuiltError)]
        assert broken == []


@pytest.mark.parametrize(
    ("model", "config", "ep", "words", "hint"),
    [
        ("llama", {}, 2, "llama has no experts", "use mesh.ep = 1"),
        ("mixtral", {"num_local_experts": 6}, 8, "more than the 6 experts of mixtral", "at most 6"),
        ("llama4_text", {}, 2, "its forward takes (hidden_states)", "use mesh.ep = 1"),
    ],
)
def test_bad_degrees_of_experts_are_refused_before_ranks_start(
    model: str, config: dict[str, Any], ep: int, words: str, hint: str
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, **config}
    tables = {"model": {"type": model, "config": sizes}, "train": {"global_batch": 8}}
    plan = Plan.from_tables({"mesh": {"dp_shard": 8, "ep": ep}})
    with pytest.raises(MeshError, match=re.escape(words)) as raised:
        require_legal(plan, RunSpec.from_tables(tables))
    assert hint in raised.value.hint


def test_experts_need_not_divide() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    tables = {"model": {"type": "mixtral", "config": {**sizes, "num_local_experts": 7}}, "train": {"global_batch": 8}}
    require_legal(Plan.from_tables({"mesh": {"dp_shard": 4, "ep": 4}}), RunSpec.from_tables(tables))
