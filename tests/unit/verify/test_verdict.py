"""The verdict as JSON and as text, requests, the plans of --all, the command's exit codes, the matrix page."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_run import call_weft

import weft.cli.verify
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.report.matrix import write_matrix
from weft.verify.request import (
    VerifyRequest,
    data_parallel_plans,
    every_plan,
    expert_parallel_plans,
    judged_plans,
    tensor_parallel_plans,
)
from weft.verify.verdict import RULES, Check, Coverage, Finding, Verdict, VerdictTable, Worst

GOOD = Verdict(
    plan="ZeRO-3",
    steps=5,
    checks=(Check.passed("loss", "5 values", margin=0.25), Check.passed("resume", "equal bits")),
    worst_gradient=Worst(parameter="a.weight", rel_diff=1e-7),
    replicated_parameters=("b",),
    changes=("num_hidden_layers 6 -> 2",),
    elapsed_s=1.5,
)
WRONG_LOSS = Check.failed("loss", Finding(rule=1, step=2, expected="5", found="6"))
WRONG_UPDATE = Check.failed(
    "first update", Finding(rule=2, step=1, parameter="a.weight", coordinates="rank 1", expected="1", found="2")
)
BAD = Verdict(plan="DDP", steps=5, checks=(WRONG_LOSS, WRONG_UPDATE), loss_max_abs_diff=math.inf)
# the fields of `weft verify --json` that other programs rely on
PROMISED = {
    "ok", "steps", "loss_max_abs_diff", "grad_norm_max_rel_diff", "worst_gradient", "worst_weight",
    "replicated_parameters", "checks",
}  # fmt: skip

INDIVISIBLE = ("--nproc", "2", "--set", "train.global_batch=7")  # shrinking must not make it legal


def test_parameters_without_a_gradient_are_named() -> None:
    names = tuple(f"layers.{block}.indexer.weight" for block in range(6))
    verdict = dataclasses.replace(GOOD, untrained_parameters=names)
    assert Verdict.from_dict(json.loads(json.dumps(verdict.as_dict()))) == verdict
    (line,) = (line for line in verdict.text().splitlines() if "no gradient" in line)
    assert "no gradient in one process either (6 parameters keep their values): layers.0.indexer.weight" in line
    assert line.endswith("layers.3.indexer.weight, and 2 more")
    assert "no gradient" not in GOOD.text()


@pytest.mark.parametrize("verdict", [GOOD, BAD])
def test_a_verdict_is_strict_json_and_comes_back(verdict: Verdict) -> None:
    text = json.dumps(verdict.as_dict(), allow_nan=False)
    fields = json.loads(text)
    assert fields.keys() >= PROMISED
    assert fields["worst_gradient"].keys() == fields["worst_weight"].keys() == {"parameter", "rel_diff"}
    assert all(check.keys() >= {"name", "ok", "detail"} for check in fields["checks"])
    assert Verdict.from_dict(fields) == verdict


def test_an_earlier_step_is_the_first_wrong_thing() -> None:
    assert BAD.first_wrong == WRONG_UPDATE
    assert BAD.as_dict()["first_wrong"] == "first update"
    rows = Check.failed("data order", Finding(rule=3, step=3, expected="a", found="b"))
    assert Verdict(plan="", steps=5, checks=(rows, WRONG_LOSS, WRONG_UPDATE)).first_wrong == rows
    assert GOOD.first_wrong is None


def test_the_text_names_the_first_wrong_thing_and_its_rule() -> None:
    lines = BAD.text().splitlines()
    assert lines[0] == "FAIL  DDP"
    assert lines[-2] == "first wrong: first update: step 1, a.weight, rank 1: expected 1, found 2"
    assert lines[-1] == f"breaks rule 2: {RULES[2]}"
    assert GOOD.text().splitlines()[0] == "PASS  ZeRO-3"
    assert "first wrong" not in GOOD.text()


def test_a_matrix_without_verdicts_proves_nothing() -> None:
    assert not VerdictTable(run="x").ok
    assert VerdictTable(run="x", verdicts=(GOOD,)).ok
    assert not VerdictTable(run="x", verdicts=(GOOD, BAD)).ok


def test_a_request_comes_back_from_json() -> None:
    request = VerifyRequest(
        run=RunSpec.default(), plans=[Plan.from_tables({"mesh": {"dp_shard": 2}})], steps=3, as_is=True, answer="a.json"
    )
    assert VerifyRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 4), (2, 4), (4, 7), (6, 10)])
def test_all_plans_are_every_layout_once(num_ranks: int, count: int) -> None:
    plans = data_parallel_plans(num_ranks, {"precision": {"preset": "bf16"}})
    layouts = {(plan.mesh.dp_replicate, plan.mesh.dp_shard, plan.data_parallel.zero) for plan in plans}
    assert len(plans) == len(layouts) == count
    assert all(plan.num_ranks == num_ranks and plan.precision.preset == "bf16" for plan in plans)
    assert {plan.data_parallel.zero for plan in plans} == {0, 1, 2, 3}


@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, []), (4, [2]), (8, [2, 4])])
def test_zero_3_is_verified_with_every_secondary_shard(num_ranks: int, sizes: list[int]) -> None:
    away = {"offload": {"optimizer": "cpu", "parameters": "cpu"}}
    for base, expected in (({}, sizes), (away, [])):  # not executed with weights on the host
        plans = every_plan(num_ranks, base, RunSpec.default())
        found = [plan.data_parallel.secondary_shard for plan in plans if plan.data_parallel.secondary_shard]
        assert found == expected


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 0), (2, 4), (4, 8), (8, 12)])
def test_tensor_parallel_plans_are_every_layout_once(num_ranks: int, count: int) -> None:
    plans = tensor_parallel_plans(num_ranks, {"precision": {"preset": "bf16"}})
    assert len(plans) == len({plan.to_toml() for plan in plans}) == count
    assert all(plan.num_ranks == num_ranks and plan.mesh.tp > 1 and plan.precision.preset == "bf16" for plan in plans)


MIXTURE = {
    "type": "mixtral",
    "config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
}


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        (1, []),
        (2, [(2, 1, 2, 1, "pairs"), (2, 1, 2, 3, "tokens"), (1, 2, 2, 0, "gather")]),
        (
            4,
            [(4, 1, 4, 1, "pairs"), (4, 1, 2, 3, "tokens"), (4, 1, 4, 3, "tokens"), *[(2, 2, 2, 3, "gather")] * 2],
        ),
    ],
)
def test_models_with_experts_have_plans_that_divide_them(
    num_ranks: int, layouts: list[tuple[int, int, int, int, str]]
) -> None:
    tables = RunSpec.default().model_dump(mode="json", exclude_none=True)
    run = RunSpec.from_tables({**tables, "model": MIXTURE})
    plans = [plan for plan in every_plan(num_ranks, {}, run) if plan.mesh.ep > 1]
    found = [
        (plan.mesh.dp_shard, plan.mesh.tp, plan.mesh.ep, plan.data_parallel.zero, plan.expert_parallel.dispatcher)
        for plan in plans
    ]
    assert found == layouts
    assert [plan.expert_parallel.tensor for plan in plans if plan.mesh.tp > 1] == ["folded", "width"][: num_ranks // 2]
    assert len({plan.to_toml() for plan in plans}) == len(plans)


def test_a_dispatcher_that_is_given_stays() -> None:
    plans = expert_parallel_plans(4, {"expert_parallel": {"dispatcher": "tokens"}})
    assert {plan.expert_parallel.dispatcher for plan in plans} == {"tokens"}


def test_a_model_without_experts_has_no_plans_of_experts() -> None:
    assert all(plan.mesh.ep == 1 for plan in every_plan(4, {}, RunSpec.default()))


@pytest.mark.parametrize("given", [{}, {"ulysses": 2}, {"attention": "ring", "ulysses": 2}])
def test_every_plan_of_four_ranks_has_pairs_that_exchange_heads(given: dict[str, Any]) -> None:
    """A base plan's groups are left out where the ranks do not have them."""
    plans = every_plan(4, {"context_parallel": given} if given else {}, RunSpec.default())
    sizes = {(plan.mesh.cp, plan.context_parallel.ulysses) for plan in plans if plan.mesh.cp > 1}
    assert (4, 2) in sizes
    assert (2, 2) not in sizes


def test_a_sequence_that_does_not_divide_leaves_out_the_plans_that_cut_it() -> None:
    tables = RunSpec.default().model_dump(mode="json", exclude_none=True)
    run = RunSpec.from_tables({**tables, "data": {**tables["data"], "sequence_length": 33}})
    plans = every_plan(2, {}, run)
    assert [plan.tensor_parallel.sequence_parallel for plan in plans if plan.mesh.tp > 1] == [False, False]


def test_the_coverage_of_tensor_parallelism_is_one_line() -> None:
    cut = Coverage(name="a", shape=(9, 10), sharded_axes=("dp_shard", "tp"))
    whole = [Coverage(name=name, shape=(5,), sharded_axes=("dp_shard",), reason="a norm") for name in "bc"]
    verdict = dataclasses.replace(GOOD, coverage=(cut, *whole))
    line = "sharded on tp: 1 of 3 parameters, 90% of the elements; replicated: a norm (2)"
    assert line in verdict.text()
    assert Verdict.from_dict(json.loads(json.dumps(verdict.as_dict()))) == verdict


def answer_with(monkeypatch: pytest.MonkeyPatch, *verdicts: Verdict) -> list[VerifyRequest]:
    """The command with ranks that answer at once; what they were asked."""
    asked: list[VerifyRequest] = []

    def carry_out(request: VerifyRequest) -> list[Verdict]:
        asked.append(request)
        return list(verdicts)

    monkeypatch.setattr(weft.cli.verify, "_run_ranks", carry_out)
    return asked


@pytest.mark.parametrize(("verdict", "code"), [(GOOD, 0), (BAD, 1)])
def test_the_answer_is_the_exit_code(verdict: Verdict, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_with(monkeypatch, verdict)
    found, out, err = call_weft("verify", "--nproc", "2", "--steps", "3", "--as-is", "--json")
    assert found == code
    assert json.loads(out) == json.loads(json.dumps(verdict.as_dict()))
    assert verdict.text() in err
    assert (asked[0].steps, asked[0].as_is, len(asked[0].plans)) == (3, True, 1)


def test_all_gives_every_plan_and_a_matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = answer_with(monkeypatch, GOOD, BAD)
    page = tmp_path / "new" / "matrix.html"
    code, out, err = call_weft("verify", "--nproc", "2", "--all", "--matrix", page, "--json")
    assert code == 1
    assert len(asked[0].plans) == 22
    answer = json.loads(out)
    assert (answer["ok"], [verdict["ok"] for verdict in answer["verdicts"]]) == (False, [True, False])
    assert "1 of 2 plans pass" in err
    left_out = [line for line in err.splitlines() if ": left out: " in line]
    assert len(left_out) == len(list(judged_plans(2, {}, RunSpec.default()))) - 22 > 0
    assert any(line.startswith("ZeRO-1, dp_shard 2, ep 2") and "has no experts" in line for line in left_out)
    assert "first update" in page.read_text(encoding="utf-8")


def test_layouts_that_the_model_does_not_allow_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_with(monkeypatch, GOOD)
    one = ("--set", "model.config.num_attention_heads=1", "--set", "model.config.num_key_value_heads=1")
    _, _, err = call_weft("verify", "--nproc", "2", "--all", *one, "--set", "model.config.num_hidden_layers=2")
    assert all(plan.mesh.tp == 1 for plan in asked[0].plans)
    left_out = [line for line in err.splitlines() if ": left out: " in line]
    assert sum("llama: attention heads must divide over tp" in line for line in left_out) == 4
    assert sum("llama: every pipeline stage needs a block" in line for line in left_out) == 4  # two per rank


@pytest.mark.parametrize(
    "arguments",
    [
        ("none.toml",),
        ("--set", "mesh.tp=2", "--set", "compile.enabled=true"),
        ("--steps", "1"),
        ("--set", "nothing.key=1"),
        ("--nproc", "0"),
        INDIVISIBLE,
    ],
)
def test_bad_input_is_two(arguments: tuple[str, ...]) -> None:
    code, _, err = call_weft("verify", *arguments)
    assert code == 2
    assert "hint:" in err


def page_of(table: VerdictTable, folder: Path) -> str:
    return write_matrix(table.as_dict(), folder / "matrix.html").read_text(encoding="utf-8")


def test_the_matrix_page_has_no_script_and_lets_no_name_out_of_its_quotes(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    wrong = Check.failed("loss", Finding(rule=1, expected=evil, found=evil))
    verdict = Verdict(plan=evil, steps=5, checks=(wrong,))
    page = page_of(VerdictTable(run=evil, verdicts=(verdict, GOOD)), tmp_path)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert "script-src" not in page
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
    assert "1 of 2 plans pass" in page


def test_a_check_a_plan_does_not_have_is_a_dash(tmp_path: Path) -> None:
    page = page_of(VerdictTable(run="x", verdicts=(GOOD, BAD)), tmp_path)
    assert "–" in page
    assert page.count("FAIL") >= 2


def test_a_matrix_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    from weft.core.errors import RunFolderError

    (tmp_path / "file").write_text("", encoding="utf-8")
    answer: dict[str, Any] = VerdictTable(run="x", verdicts=(GOOD,)).as_dict()
    with pytest.raises(RunFolderError):
        write_matrix(answer, tmp_path / "file" / "matrix.html")
