"""`weft dryrun` and `weft plan --dryrun` as a user meets them: words, JSON, exit codes, sweeps, refusals.

Dry runs are made by hand here, but for one; what they measure is tested in tests/fake/dryrun.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dry_run_cases import GIB, found_of, holder_of
from tiny_run import call_weft

from weft.cli.dryrun import question, sweep, view
from weft.cli.dryrun.question import changes_that_fit, devices_of
from weft.cli.resolve import resolve_model
from weft.core.errors import MeshError, ModelError, NotBuiltError, WeftError
from weft.dryrun import many
from weft.dryrun.record import DryRun

LLAMA = """
[model]
type = "llama"
[model.config]
hidden_size = 4096
intermediate_size = 14336
num_hidden_layers = 32
num_attention_heads = 32
num_key_value_heads = 8
vocab_size = 128256
[data]
sequence_length = 8192
[train]
global_batch = 32
"""
PLAN = '[mesh]\ndp_shard = 8\n[precision]\npreset = "bf16"\n'

Measured = Callable[[many.DryRunJob], "DryRun | WeftError"]
Stub = Callable[[Measured], list[many.DryRunJob]]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(LLAMA, encoding="utf-8")
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    return tmp_path


@pytest.fixture
def measured_by(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Puts a function in place of dry runs; the jobs it was asked are in the list returned."""

    def put(measured: Measured) -> list[many.DryRunJob]:
        seen: list[many.DryRunJob] = []

        def dry_runs(jobs: Sequence[many.DryRunJob], *, on_done: Any = None, processes: Any = None) -> list[Any]:
            seen.extend(jobs)
            found = [measured(job) for job in jobs]
            for place, outcome in enumerate(found):
                on_done(place, outcome)
            return found

        for module in (many, question, sweep):
            monkeypatch.setattr(module, "dry_runs", dry_runs)
        return seen

    return put


def of_tokens(job: many.DryRunJob) -> DryRun:
    """8 GiB and a KiB for each token of a micro-batch: 64 KiB of reserved memory a token."""
    rows = job.run.train.global_batch // job.plan.mesh.dp_degree // job.plan.pipeline.microbatches
    tokens = rows * job.run.data.sequence_length
    size = 8 * GIB + 2**16 * tokens
    return found_of(terms={"activations": size}, reserved_bytes={"expandable_segments": size, "fixed_segments": size})


def test_what_fits_says_by_how_much(files: Path, measured_by: Stub) -> None:
    jobs = measured_by(lambda job: found_of())
    code, out, err = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200")
    assert code == 0, err
    assert "ZeRO-3 (FSDP) 8: rank 0 of 8, 8.03 B parameters" in out
    assert "logits and their gradients: 31.0 GiB, made in the forward and the backward of the loss" in out
    assert "the peak is in the backward, at the loss (aten._log_softmax_backward_data)" in out
    assert "recomputing activations (activations.policy = 'full') would save about" in out
    assert "reserves 60.0 GiB with expandable segments (8% of it idle at the peak), 64.0 GiB without" in out
    assert "computes 28.00 TFLOP per step" in out
    assert "fits on H200: 79.2 GiB to spare" in out
    assert "weft plan" in out
    assert (jobs[0].on_gpu, jobs[0].attention) == (True, "cudnn")


def test_what_does_not_fit_ends_with_1_and_says_what_would(files: Path, measured_by: Stub) -> None:
    too_much = {"expandable_segments": 200 * GIB, "fixed_segments": 210 * GIB}
    measured_by(lambda job: found_of(terms={"activations": 190 * GIB}, reserved_bytes=too_much))
    code, out, _ = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200")
    assert code == 1
    assert "does not fit on H200: 60.8 GiB too much" in out
    assert "  pipeline.microbatches = " in out
    assert "slower" in out


def test_the_json_has_the_fields_that_programs_rely_on(files: Path, measured_by: Stub) -> None:
    too_much = {"expandable_segments": 200 * GIB, "fixed_segments": 210 * GIB}
    measured_by(lambda job: found_of(reserved_bytes=too_much))
    code, out, err = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200", "--json")
    answer = json.loads(out)
    assert code == 1
    assert {"rank", "world_size", "memory", "traffic", "elapsed_s", "device", "capacity_bytes", "fits"} <= set(answer)
    assert answer["memory"]["peak_bytes"] == sum(answer["memory"]["terms"].values())
    assert answer["memory"]["predicted"]["weights"] == pytest.approx(8.03e9 * 4 / 8, rel=0.001)
    assert answer["free_bytes"] == answer["capacity_bytes"] - answer["needed_bytes"] < 0
    assert answer["fits"] is False
    assert answer["changes"]
    assert set(answer["changes"][0]) == {"keys", "text", "memory_bytes", "step_s", "saves_bytes"}
    assert answer["culprit"]["term"] == "logits_and_loss"
    assert answer["memory"]["peak_at"]["phase"] == "backward"
    assert "on fake tensors" in err


def test_what_a_change_would_save_is_of_the_peak_that_was_found(files: Path, measured_by: Stub) -> None:
    """The planner counts 400 MiB a communicator, beside a peak that is smaller than that."""
    (files / "plan.toml").write_text("[mesh]\ndp_replicate = 2\ndp_shard = 4\n", encoding="utf-8")
    measured_by(lambda job: found_of(terms={"weights": 2**26, "activations": 2**20}, reserved_bytes={}))
    _, out, err = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200", "--json")
    saving = json.loads(out)["largest_saving"]
    assert saving is not None, err
    assert 0 < saving["saves_bytes"] <= 2**26 + 2**20


def test_changes_are_no_more_hopeful_than_the_dry_run(files: Path, measured_by: Stub) -> None:
    def offered(times: int) -> list[int]:
        needed = times * 200 * GIB
        measured_by(lambda job: found_of(reserved_bytes={"expandable_segments": needed, "fixed_segments": needed}))
        _, out, _ = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200", "--json")
        answer = json.loads(out)
        predicted = sum(answer["memory"]["predicted"].values())
        budget = answer["capacity_bytes"] * predicted / answer["needed_bytes"]
        assert all(change["memory_bytes"] <= budget for change in answer["changes"])
        return [change["memory_bytes"] for change in answer["changes"]]

    assert max(offered(1)) > max(offered(4))  # needing four times what was foreseen asks for more than a small change


def test_without_a_device_nothing_has_to_fit(files: Path, measured_by: Stub) -> None:
    jobs = measured_by(lambda job: found_of())
    code, out, _ = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--json")
    answer = json.loads(out)
    assert (code, answer["fits"], answer["device"], answer["changes"]) == (0, None, None, [])
    assert answer["memory"]["predicted"]["weights"] > 0
    assert jobs[0].on_gpu


def test_a_cpu_takes_a_cpus_kernels(files: Path, measured_by: Stub) -> None:
    jobs = measured_by(lambda job: found_of(reserved_bytes={}))
    call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--device", "CPU")
    assert not jobs[0].on_gpu


def test_the_last_rank_is_run_too_where_shards_are_uneven(files: Path, measured_by: Stub) -> None:
    jobs = measured_by(lambda job: found_of(rank=job.rank, terms={"weights": 10 * GIB - job.rank}))
    call_weft("dryrun", "run.toml", "--plan", "plan.toml")
    assert [job.rank for job in jobs] == [0]
    _, out, _ = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--set", "model.config.vocab_size=128257")
    assert [job.rank for job in jobs[1:]] == [0, 7]
    assert "rank 0 of 8" in out
    assert "rank 7 has its peak at 10.0 GiB" in out
    call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--rank", "5")
    assert [job.rank for job in jobs[3:]] == [5]


def test_refusals_come_before_any_process(files: Path, measured_by: Stub) -> None:
    jobs = measured_by(lambda job: found_of())
    cases = {
        "W202": ["--plan", "plan.toml", "--rank", "8"],
        "W203": ["--plan", "plan.toml", "--set", "train.global_batch=12"],
        "W204": ["--plan", "plan.toml", "--set", "mesh.tp=2", "--set", "compile.enabled=true"],
        "W205": ["--plan", "plan.toml", "--device", "H2000000"],
        "W102": ["--plan", "plan.toml", "--set", "train.gloabl_batch=8"],
        "W101": ["--plan", "missing.toml"],
    }
    for code, options in cases.items():
        status, _, err = call_weft("dryrun", "run.toml", *options)
        assert (status, code in err, "hint: " in err) == (2, True, True), err
    assert not jobs


def test_an_error_of_the_dry_run_is_the_answer(files: Path, measured_by: Stub) -> None:
    measured_by(lambda job: NotBuiltError("this model decides by values", hint="weft plan estimates it"))
    code, out, err = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--json")
    assert code == 2
    assert json.loads(out)["code"] == "W204"
    assert "error [W204]: this model decides by values" in err


def test_an_interrupt_ends_in_one_line(files: Path, measured_by: Stub) -> None:
    def interrupted(job: many.DryRunJob) -> DryRun:
        raise KeyboardInterrupt

    measured_by(interrupted)
    code, _, err = call_weft("dryrun", "run.toml", "--plan", "plan.toml")
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("largest", "text"),
    [
        ((holder_of(term="activations", module="model.layers.*.mlp.up_proj"),), "at least 10.0 GiB of it from model."),
        ((holder_of(term="activations", nbytes=40 * GIB, module="model.norm"),), "40.0 GiB, all of it from model.norm"),
        ((), "activations: 40.0 GiB"),
    ],
)
def test_the_culprit_says_where_it_was_made(largest: Any, text: str) -> None:
    peak = found_of(terms={"activations": 40 * GIB, "weights": GIB}, largest=largest).peak
    assert text in view.culprit(peak)["text"]


def test_a_sweep_of_values_is_a_table(files: Path, measured_by: Stub) -> None:
    jobs = measured_by(of_tokens)
    sweep = "data.sequence_length=2048,1048576"
    code, out, _ = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200", "--sweep", sweep)
    assert code == 0
    assert "2,048" in out
    assert "the largest data.sequence_length of these that fits on H200 is 2,048" in out
    assert [job.run.data.sequence_length for job in jobs] == [2048, 1048576]
    assert all(job.memory_only for job in jobs)


def test_a_sweep_settles_what_is_left_open_for_each_value(files: Path, measured_by: Stub) -> None:
    """Compiled blocks are taken where they are built, at each value: nobody asked for them with selective recompute."""
    seen = measured_by(lambda _job: found_of())
    sweep = "activations.policy=none,selective,full"
    code, _, err = call_weft("dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200", "--sweep", sweep)
    assert code == 0, err
    compiled = {job.plan.activations.policy: job.plan.compile.enabled for job in seen}
    assert compiled == {"none": True, "selective": False, "full": True}


def test_a_sweep_without_values_finds_the_largest(files: Path, measured_by: Stub) -> None:
    jobs = measured_by(of_tokens)
    options = ("--plan", "plan.toml", "--device", "H200", "--json")
    _, out, _ = call_weft("dryrun", "run.toml", *options, "--sweep", "data.sequence_length")
    answer = json.loads(out)["sweep"]
    room = 150_109_880_320 - 649_000_000 - 8 * GIB
    assert answer["largest_fitting"] == room // 2**16 // 4 // 256 * 256  # four rows of a micro-batch
    assert len(jobs) <= 10
    del jobs[:]
    _, out, _ = call_weft("dryrun", "run.toml", *options, "--sweep", "microbatch")
    assert json.loads(out)["sweep"]["largest_fitting"] == room // 2**16 // 8192
    assert {job.plan.pipeline.microbatches for job in jobs} == {1}


def test_a_sweep_goes_down_where_the_start_is_too_much(files: Path, measured_by: Stub) -> None:
    measured_by(of_tokens)
    options = ("--plan", "plan.toml", "--device", "H200", "--json", "--set", "data.sequence_length=1048576")
    _, out, _ = call_weft("dryrun", "run.toml", *options, "--sweep", "data.sequence_length")
    room = 150_109_880_320 - 649_000_000 - 8 * GIB
    assert json.loads(out)["sweep"]["largest_fitting"] == room // 2**16 // 4 // 256 * 256


def test_a_curve_that_is_no_line_is_closed_in_on_as_well(measured_by: Stub, files: Path) -> None:
    def quadratic(job: many.DryRunJob) -> DryRun:
        size = 8 * GIB + 4 * job.run.data.sequence_length**2
        return found_of(terms={"activations": size}, reserved_bytes={"expandable_segments": size})

    jobs = measured_by(quadratic)
    _, out, _ = call_weft(
        "dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200", "--sweep", "data.sequence_length", "--json"
    )
    room = 150_109_880_320 - 649_000_000 - 8 * GIB
    assert json.loads(out)["sweep"]["largest_fitting"] == int((room / 4) ** 0.5) // 256 * 256
    assert len(jobs) <= sweep.MAX_RUNS + 1


def test_a_sweep_where_nothing_fits_ends_with_1(files: Path, measured_by: Stub) -> None:
    measured_by(lambda job: found_of(reserved_bytes={"expandable_segments": 10**13}))
    code, out, _ = call_weft(
        "dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200", "--sweep", "activations.policy=none,full"
    )
    assert code == 1
    assert "none fits on H200" in out


def test_one_bad_value_is_a_row_and_only_bad_ones_an_error(files: Path, measured_by: Stub) -> None:
    measured_by(lambda job: found_of())
    sweep = ("dryrun", "run.toml", "--plan", "plan.toml", "--json", "--sweep")
    _, out, _ = call_weft(*sweep, "train.global_batch=8,9")
    rows = json.loads(out)["sweep"]["rows"]
    assert rows[0]["error"] is None
    assert "does not divide" in rows[1]["error"]
    for bad in ("train.global_batch=9", "foo", "train.gloabl_batch=8", "microbatch=a", "mesh.dp_shard", "seed=,"):
        code, _, err = call_weft(*sweep, bad)
        assert code == 2, err


def test_a_model_is_named_as_for_the_planner(files: Path) -> None:
    run = resolve_model("llama-3-8b", ["data.sequence_length=2048"], rows=8)
    assert run.model.type == "llama"
    assert run.model.config["vocab_size"] == 128256
    assert (run.data.sequence_length, run.train.global_batch) == (2048, 8)
    assert resolve_model("gpt2", []).model.config["vocab_size"] == 50257  # a default of its type, not the tokenizer's
    (files / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    assert resolve_model(str(files / "config.json"), []).model.path == str(files)
    with pytest.raises(ModelError):
        resolve_model("lama-3-8b-with-no-such-name", [])


def test_devices_fill_nodes_or_smaller_ones() -> None:
    assert devices_of("H200", num_ranks=1) == "H200"
    assert devices_of("H200", num_ranks=64) == "8x8xH200"
    assert devices_of("H200", num_ranks=12) == "2x6xH200"
    assert devices_of("8xH200", num_ranks=8) == "8xH200"
    with pytest.raises(MeshError, match="8 devices but the plan has 16"):
        devices_of("8xH200", num_ranks=16)


def test_plans_are_confirmed_and_what_is_not_built_says_so(files: Path, measured_by: Stub) -> None:
    jobs = measured_by(lambda job: found_of())
    asked = ("plan", "llama-3-8b", "--devices", "8xH100-80GB", "--sequence-length", "4096", "--global-batch", "128")
    _, out, _ = call_weft(*asked, "--dryrun", "--top", "6", "--json")
    plans = json.loads(out)["plans"]
    built = [plan for plan in plans if plan["dry_run"]["reason"] is None]
    assert len(built) == len(jobs) > 0
    for plan in built:
        allocated = plan["memory"]["total_bytes"] - plan["memory"]["terms"]["framework"]
        assert plan["dry_run"]["error"] == pytest.approx(allocated / (55 * GIB) - 1)
        assert plan["dry_run"]["fits"] is True
    assert all(job.run.train.global_batch == 128 and job.run.data.sequence_length == 4096 for job in jobs)
    not_built = (*asked, "--set", "mesh.tp=2", "--set", "compile.enabled=true", "--dryrun", "--top", "2")
    plans = json.loads(call_weft(*not_built, "--json")[1])["plans"]
    assert all(plan["dry_run"]["reason"].startswith("not built: ") for plan in plans)
    assert "not built" in call_weft(*not_built)[1]
    code, out, _ = call_weft(*asked, "--dryrun", "--top", "6")
    assert code == 0
    assert "55.0 GiB (" in out


def test_a_best_plan_that_a_dry_run_refutes_is_no_answer(files: Path, measured_by: Stub) -> None:
    measured_by(lambda job: found_of(reserved_bytes={"expandable_segments": 10**12}))
    code, out, _ = call_weft("plan", "gpt2", "--devices", "8xH100-80GB", "--global-batch", "64", "--dryrun")
    assert code == 1
    assert "too much" in out


def test_a_real_one(files: Path) -> None:
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = [f"--set=model.config.{key}={value}" for key, value in (tiny | {"num_key_value_heads": 2}).items()]
    code, out, err = call_weft(
        "dryrun", "run.toml", "--plan", "plan.toml", "--device", "H200", "--json",
        *settings, "--set=data.sequence_length=64", "--set=model.config.vocab_size=512",
    )  # fmt: skip
    assert code == 0, err
    answer = json.loads(out)
    assert answer["world_size"] == 8
    assert answer["memory"]["peak_bytes"] == sum(answer["memory"]["terms"].values())
    assert answer["fits"] is True


@pytest.mark.parametrize(("device", "preset"), [("H200", "bf16"), ("CPU", "fp32")])
def test_a_plan_that_leaves_precision_open_computes_as_training_would_there(
    device: str, preset: str, measured_by: Stub, files: Path
) -> None:
    jobs = measured_by(lambda job: found_of())
    (files / "open.toml").write_text("[mesh]\ndp_shard = 8\n", encoding="utf-8")
    call_weft("dryrun", "run.toml", "--plan", "open.toml", "--device", device)
    assert [job.plan.precision.preset for job in jobs] == [preset]


@pytest.mark.parametrize(("foreseen", "budget"), [(150, 80), (100, 64), (125, 80)])
def test_what_would_fit_is_never_more_than_the_device(
    foreseen: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner that counts too little gets as much less to fill; one that counts too much gets the device."""
    fit = SimpleNamespace(fits=False, capacity_bytes=80, needed_bytes=125)
    question: Any = SimpleNamespace(fit=lambda _found: fit, request=1, plan=2)
    asked: list[int] = []
    monkeypatch.setattr(
        "weft.cli.dryrun.question.smallest_changes", lambda *_, budget_bytes: asked.append(budget_bytes) or []
    )
    changes_that_fit(question, SimpleNamespace(), SimpleNamespace(memory_bytes=foreseen * 1.0))  # type: ignore[arg-type]
    assert asked == [budget]
