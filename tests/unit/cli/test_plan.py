"""`weft plan` as a user and a program meet it: the answer, its JSON, exit codes, refusals, files."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny_run import call_weft

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.data import open_corpus
from weft.models.shape.lookup import shape_of

EIGHT = ("--devices", "8xH100-80GB")
ASKED = ("plan", "llama-3-8b", *EIGHT, "--global-batch", "64", "--sequence-length", "4096")


class Told(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def told(*arguments: str) -> Told:
    return Told(*call_weft(*arguments))


def answer(*arguments: str, code: int = 0) -> Any:
    found = told(*arguments, "--json")
    assert found.code == code, found.err
    return json.loads(found.out)


def test_the_answer_has_the_fields_that_programs_rely_on() -> None:
    found = answer(*ASKED, "--top", "3")
    assert {"plans", "considered", "rejected", "elapsed_s"} <= set(found)
    assert len(found["plans"]) == 3
    for plan in found["plans"]:
        assert plan["fits"] is True
        assert plan["memory"]["total_bytes"] == sum(plan["memory"]["terms"].values())
        assert plan["time"]["step_s"] == pytest.approx(sum(plan["time"]["terms"].values()))
        assert plan["tokens_per_s"] == pytest.approx(64 * 4096 / plan["time"]["step_s"])
        assert 0 < plan["mfu"] < 1
        assert plan["why"]
        assert Plan.from_tables(plan["plan"]).num_ranks == 8
        for row in plan["traffic"]:
            assert {"axis", "collective", "phase", "bytes"} <= set(row)
    times = [plan["time"]["step_s"] for plan in found["plans"]]
    assert times[1] >= 0.97 * times[0]  # ties within 3% go to the simpler plan
    assert found["considered"] == found["estimated"] + sum(found["rejected"].values()) - _too_large(found)
    assert found["model"]["parameters"] == 8_030_261_248


def _too_large(found: Any) -> int:
    return sum(count for reason, count in found["rejected"].items() if "memory" in reason)


def test_an_eight_billion_model_on_eight_devices_is_sharded() -> None:
    eager = answer(*ASKED, "--set", "compile.enabled=false")["plans"][0]
    assert eager["plan"]["data_parallel"]["zero"] >= 2
    assert eager["plan"]["mesh"]["dp_shard"] == 8
    best = answer(*ASKED)["plans"][0]  # with less to keep, gradients need not be sharded
    assert best["plan"]["data_parallel"]["zero"] >= 1
    assert best["plan"]["mesh"]["dp_shard"] == 8
    assert best["plan"]["compile"]["enabled"]
    assert best["plan"]["kernels"]["loss"] == "fused"
    assert "does not fit on one device" in best["why"]


def test_a_small_model_is_replicated_and_says_the_rule() -> None:
    best = answer("plan", "gpt2", *EIGHT, "--global-batch", "64")["plans"][0]
    assert best["plan"]["data_parallel"]["zero"] == 0
    assert "fits on one device, so DDP" in best["why"]


def test_fixed_keys_are_kept() -> None:
    found = answer(*ASKED, "--set", "mesh.tp=2", "--set", "data_parallel.zero=3", "--set", "activations.policy=full")
    for plan in found["plans"]:
        assert plan["plan"]["mesh"]["tp"] == 2
        assert plan["plan"]["data_parallel"]["zero"] == 3
        assert plan["plan"]["activations"]["policy"] == "full"


def test_a_written_plan_is_commented_and_estimates_alike(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    best = answer(*ASKED, "--out", str(path))["plans"][0]
    text = path.read_text()
    assert text.startswith("# ")
    assert "predicted" in text
    assert Plan.from_tables(tomllib.loads(text)) == Plan.from_tables(best["plan"])
    alone = answer(*ASKED, "--plan", str(path))
    assert alone["considered"] == 1
    assert alone["plans"][0]["memory"] == best["memory"]
    assert alone["plans"][0]["time"]["step_s"] == pytest.approx(best["time"]["step_s"])


def test_a_plan_that_does_not_fit_is_told_so_with_exit_1(tmp_path: Path) -> None:
    (tmp_path / "ddp.toml").write_text("[mesh]\ndp_replicate = 8\n[precision]\npreset = 'bf16'\n")
    found = answer(*ASKED, "--plan", str(tmp_path / "ddp.toml"), code=1)
    assert found["plans"][0]["fits"] is False
    assert found["what_would_fit"]


def test_nothing_fits_names_the_smallest_changes() -> None:
    found = answer("plan", "llama-3-70b", "--devices", "2xRTX4090", code=1)
    assert not found["plans"][0]["fits"]
    assert "a device with" in found["what_would_fit"][0]


def test_a_model_may_be_a_config_or_a_run(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
              "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.toml").write_text(
        "[model]\ntype = 'llama'\nconfig = { hidden_size = 512, intermediate_size = 1024, num_hidden_layers = 4,"
        " num_attention_heads = 8, num_key_value_heads = 8, vocab_size = 1000 }\n"
        "[data]\nsequence_length = 128\n[train]\nglobal_batch = 16\noptimizer = 'sgd'\n"
    )
    expected = shape_of(config).num_parameters
    for model in ("config.json", ".", "run.toml"):
        found = answer("plan", str(tmp_path / model), "--devices", "2xRTX4090")
        assert found["model"]["parameters"] == expected
    assert found["workload"] == {"global_batch": 16, "sequence_length": 128, "optimizer": "sgd"}


def test_the_arithmetic_adds_up_to_the_estimate() -> None:
    found = answer(*ASKED, "--explain", "memory")
    best = found["plans"][0]
    sums: dict[str, float] = {}
    for line in found["arithmetic"]:
        sums[line["term"]] = sums.get(line["term"], 0.0) + line["bytes"]
    for term, size in best["memory"]["terms"].items():
        assert sums.get(term, 0.0) == pytest.approx(size, abs=2)


@pytest.mark.parametrize(("model", "shards"), [("mixtral-8x7b", 64), ("gpt2", 64), ("llama-3-8b", 8), ("gpt2", 1)])
def test_the_printed_arithmetic_of_states_is_their_size(model: str, shards: int) -> None:
    """Also where rows do not divide: 50,257 words over 64 ranks."""
    keys = ("--set", f"mesh.dp_shard={shards}", "--set", f"data_parallel.zero={3 if shards > 1 else 0}")
    found = answer("plan", model, "--devices", f"{shards}xH100-80GB", *keys, "--top", "1", "--explain", "memory")
    lines = {line["term"]: line for line in found["arithmetic"]}
    for term in ("weights", "optimizer_state"):
        count, quotient, size = re.fullmatch(
            r"([\d,]+)(?: of [\d,]+)? parameters(?: / (\d+)|, the largest of \d+ shards)? x ([\d.]+) B.*",
            lines[term]["formula"],
        ).groups()  # type: ignore[union-attr]
        product = int(count.replace(",", "")) / int(quotient or 1) * float(size)
        assert product == pytest.approx(lines[term]["bytes"], rel=0.001), lines[term]


@pytest.mark.parametrize("what", ["memory", "time", "traffic"])
def test_explanations_are_printed(what: str) -> None:
    found = told(*ASKED, "--explain", what)
    assert found.code == 0
    words = {"memory": "optimizer_state", "time": "matmul", "traffic": "reduce_scatter"}
    assert words[what] in found.out


def test_attention_work_of_ranks_is_explained_for_both_splits() -> None:
    asked = (
        *ASKED,
        "--set",
        "mesh.cp=4",
        "--set",
        "context_parallel.attention=ring",
        "--top",
        "1",
        "--explain",
        "time",
    )
    work = answer(*asked)["attention_work"]
    assert max(work["zigzag"]) / min(work["zigzag"]) < 1.02
    assert work["contiguous"] == pytest.approx([1 / 4, 3 / 4, 5 / 4, 7 / 4], rel=1e-3)
    found = told(*asked).out
    assert "zigzag (this plan)" in found
    assert "1.750" in found
    assert answer(*ASKED, "--set", "mesh.cp=1", "--top", "1", "--explain", "time")["attention_work"] == {}


def test_attention_of_documents_is_explained() -> None:
    asked = (*ASKED, "--set", "mesh.tp=1", "--top", "1", "--explain", "time")
    by_document = (*asked, "--set", "data.document_length=511")
    whole, masked, fused = answer(*asked), answer(*by_document), answer(*by_document, "--set", "model.attention=fused")
    assert (whole["document_length"], whole["documents"]) == (None, None)
    assert fused["document_length"] == 511
    assert "12.5% of the pairs of whole rows in FLOPs and MFU, and in time" in fused["documents"]
    assert "every pair of a row" in masked["documents"]
    seconds = [found["plans"][0]["time"]["terms"]["attention"] for found in (whole, masked, fused)]
    assert seconds[2] < seconds[0] < seconds[1]
    assert masked["documents"] in " ".join(told(*by_document).out.split())


@pytest.mark.parametrize("value", ["0", "5000", "long"])
def test_impossible_document_lengths_are_refused(value: str) -> None:
    found = told(*ASKED, "--set", f"data.document_length={value}")
    assert found.code == 2
    assert "data.document_length" in found.err


def test_document_length_of_a_run_is_that_of_its_cached_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text('{"text": "abcdefg"}\n{"text": "abc"}\n' * 20)
    run = RunSpec.from_tables(
        {
            "model": {"type": "llama"},
            "data": {
                "source": str(tmp_path / "rows.jsonl"), "tokenizer": "bytes", "packing": "documents",
                "sequence_length": 10, "eval_fraction": 0.0,
            },
        }
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(run.to_toml())
    asked = ("plan", str(tmp_path / "run.toml"), *EIGHT, "--top", "1", "--explain", "time")
    (tmp_path / "rows.jsonl").rename(tmp_path / "elsewhere")
    assert answer(*asked)["document_length"] is None
    (tmp_path / "elsewhere").rename(tmp_path / "rows.jsonl")
    assert answer(*asked)["document_length"] is None
    open_corpus(run.data)
    assert answer(*asked)["document_length"] == (7**2 + 3**2) / 10


INFERENCE = {"verb": ("inference",), "older form": ("plan", "--inference")}
DRAW = {"verb": ("schedule",), "older form": ("plan", "--draw-schedule")}


@pytest.mark.parametrize("form", INFERENCE)
def test_inference_counts_weights_and_cache(form: str) -> None:
    asked = (*INFERENCE[form], "llama-2-7b", "--devices", "H100", "--context", "4096")
    found = answer(*asked, "--concurrent", "8")
    counted = found["inference"]
    # 32 layers x 2 x 32 heads x 128 numbers x 2 bytes
    assert counted["kv_cache_bytes_per_token"] == 32 * 2 * 32 * 128 * 2
    assert counted["memory"]["terms"]["weights"] == 2 * 6_738_415_616
    assert counted["memory"]["terms"]["kv_cache"] == 8 * 4096 * counted["kv_cache_bytes_per_token"]
    assert counted["fits"] is True
    quantised = answer(*asked, "--weights", "int4", "--kv-cache", "fp8")["inference"]
    assert quantised["memory"]["terms"]["weights"] < 0.35 * counted["memory"]["terms"]["weights"]
    assert quantised["kv_cache_bytes_per_token"] * 2 == counted["kv_cache_bytes_per_token"]
    assert quantised["kv_cache_scale_bytes_per_token"] == 32 * 2 * 32 * 2
    assert quantised["memory"]["terms"]["kv_cache"] == 4096 * (
        quantised["kv_cache_bytes_per_token"] + quantised["kv_cache_scale_bytes_per_token"]
    )
    assert quantised["max_concurrent"] > 2 * counted["max_concurrent"]
    shown = told(*asked, "--concurrent", "10000")
    assert shown.code == 1
    assert "does not fit" in shown.out


@pytest.mark.parametrize("form", DRAW)
def test_a_schedule_is_drawn(form: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.svg"
    found = told(*DRAW[form], "1f1b", "--stages", "4", "--microbatches", "8", "--out", str(path))
    assert found.code == 0
    assert found.out.count("rank ") >= 4
    assert "27.3%" in found.out  # (p - 1) / (m + p - 1) = 3 / 11
    assert path.read_text().startswith("<svg")
    assert "in flight at most, by rank: 4, 3, 2, 1" in found.out


@pytest.mark.parametrize("form", DRAW)
def test_a_drawing_without_a_path_is_named_after_its_schedule(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = (*DRAW[form], "zbv", "--stages", "2", "--microbatches", "4")
    assert answer(*draw)["in_flight_by_rank"] == [4, 4]
    assert not list(tmp_path.iterdir())  # data was asked for, not a picture
    assert told(*draw).code == 0
    assert (tmp_path / "zbv-2x4.svg").read_text().startswith("<svg")


def test_a_drawing_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    found = told("schedule", "1f1b", "--out", str(tmp_path / "none" / "x.svg"))
    assert found.code == 2
    assert "cannot be written" in found.err


BAD_REQUESTS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "no model": (("plan",), "W100", "weft plan llama-3-8b"),
    "no devices": (("plan", "llama-3-8b"), "W100", "--devices"),
    "unknown model": (("plan", "llama-3-8c", *EIGHT), "W301", "llama-3-8b"),
    "unknown device": (("plan", "llama-3-8b", "--devices", "8xH1000"), "W205", "H100-80GB"),
    "missing config": (("plan", "none.json", *EIGHT), "W101", "config.json"),
    "missing run": (("plan", "none.toml", *EIGHT), "W101", "path"),
    "misspelt key": ((*ASKED, "--set", "mesh.tpp=2"), "W102", "'tp'"),
    "misspelt section": ((*ASKED, "--set", "mess.tp=2"), "W102", "'mesh'"),
    "heads over tp": ((*ASKED, "--set", "mesh.tp=3"), "W201", "1, 2, 4, 8"),
    "unknown optimizer": ((*ASKED, "--optimizer", "lamb"), "W103", "adamw"),
    "unknown precision": ((*ASKED, "--precision", "fp7"), "W103", "bf16"),
    "unknown attention": ((*ASKED, "--set", "model.attention=flesh"), "W103", "fused"),
    "another key of the run": ((*ASKED, "--set", "model.path=x"), "W102", "mesh"),
    "float8 on Ampere": (
        ("plan", "llama-3-8b", "--devices", "8xA100-80GB", "--set", "float8.linears=all"),
        "W201",
        "float8.linears = 'none'",
    ),
    "unknown schedule": (("schedule", "2f2b"), "W103", "1f1b"),
    "unknown schedule, older form": (("plan", "--draw-schedule", "2f2b"), "W103", "1f1b"),
    "too few micro-batches": (("schedule", "dualpipev", "--microbatches", "3"), "W103", "--microbatches"),
    "inference without devices": (("inference", "llama-3-8b"), "W100", "--help"),
    "inference in an unknown format": (
        ("inference", "llama-3-8b", "--devices", "H100", "--weights", "int3"),
        "W100",
        "--help",
    ),
    "batch below dp": (
        ("plan", "gpt2", *EIGHT, "--global-batch", "4", "--set", "mesh.dp_replicate=8"),
        "W201",
        "8 would",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_gets_one_sentence_and_a_hint(case: str) -> None:
    arguments, code, hint = BAD_REQUESTS[case]
    found = told(*arguments)
    assert found.code == 2, found.err
    assert f"error [{code}]" in found.err
    assert "Traceback" not in found.err
    assert hint in found.err.split("hint:")[1]


def test_seven_heads_on_two_ranks_name_the_legal_degrees(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 448, "intermediate_size": 896, "num_hidden_layers": 2,
              "num_attention_heads": 7, "num_key_value_heads": 7, "vocab_size": 1000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "plan.toml").write_text("[mesh]\ntp = 2\n")
    asked = ("plan", str(tmp_path), "--devices", "2xRTX4090", "--plan", str(tmp_path / "plan.toml"))
    found = told(*asked)
    assert found.code == 2
    assert "heads must divide over tp" in found.err
    assert "1, 7" in found.err


def test_a_run_without_a_vocabulary_takes_its_tokenizers_as_training_does(tmp_path: Path) -> None:
    from weft.core.run_spec import RunSpec
    from weft.models.build import build_config, build_skeleton

    path = tmp_path / "run.toml"
    path.write_text(RunSpec.default().to_toml())
    found = answer("plan", str(path), "--devices", "2xRTX4090")
    config = build_config(RunSpec.default().model, vocab_size=257)
    assert found["model"]["parameters"] == sum(parameter.numel() for parameter in build_skeleton(config).parameters())


def test_only_what_this_version_trains() -> None:
    found = answer(*ASKED, "--trains")
    assert found["trains"] is True
    for plan in found["plans"]:
        built = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1}
        assert plan["plan"]["mesh"] | built == dict.fromkeys(plan["plan"]["mesh"], 1)
        assert plan["plan"]["tensor_parallel"]["mode"] == "1d"
        assert plan["plan"]["offload"]["optimizer"] == "none"
        assert not plan["plan"]["pipeline"]["schedule"].startswith("pipedream")


def test_precision_is_explained_with_its_source_and_bytes() -> None:
    text = told(
        *ASKED, "--precision", "deepseek-v3", "--set", "precision.second_moment=float32", "--explain", "precision"
    )
    assert "preset deepseek-v3" in text.out
    assert "at rest" in text.out
    found = answer(
        *ASKED, "--precision", "deepseek-v3", "--set", "precision.second_moment=float32", "--explain", "precision"
    )
    rows = {row["component"]: row for row in found["precision"]}
    assert (rows["products"]["format"], rows["first_moment"]["format"]) == ("float8_e4m3", "bfloat16")
    assert rows["second_moment"] == {
        "component": "second_moment", "format": "float32", "why": "precision.second_moment",
        "bytes_per_parameter": 4.0, "is_at_rest": True,
    }  # fmt: skip
    assert sum(row["bytes_per_parameter"] for row in rows.values() if row["is_at_rest"]) == 4 + 2 + 4 + 4
    assert found["plans"][0]["plan"]["float8"]["linears"] == "all"
    assert "arXiv:2412.19437" in found["preset"]["source"]


def test_float8_is_priced_and_explained() -> None:
    plain, short = (answer(*ASKED, *keys, "--top", "1") for keys in ((), ("--set", "float8.linears=all")))
    assert plain["plans"][0]["plan"]["float8"]["linears"] == "none"
    assert short["plans"][0]["plan"]["float8"]["linears"] == "all"
    assert short["plans"][0]["tokens_per_s"] > 1.2 * plain["plans"][0]["tokens_per_s"]
    assert "float8 matmuls: 1." in short["plans"][0]["why"]
    told_time = told(*ASKED, "--set", "float8.linears=all", "--top", "1", "--explain", "time")
    assert "float8_casts" in told_time.out


def test_the_attention_that_runs_is_said_and_may_be_named() -> None:
    asked = ("plan", "gpt-oss-20b", *EIGHT, "--global-batch", "64", "--sequence-length", "4096", "--top", "1")
    written, fused = (answer(*asked, *keys) for keys in ((), ("--set", "model.attention=fused")))
    assert written["attention"] == {"asked": "sdpa", "writes_scores": True}
    assert fused["attention"] == {"asked": "fused", "writes_scores": False}
    assert any("written out" in line for line in written["assumed"])
    assert fused["plans"][0]["time"]["step_s"] < 0.6 * written["plans"][0]["time"]["step_s"]


def test_a_fixed_schedule_leaves_plans_without_a_pipeline_out() -> None:
    for plan in answer(*ASKED, "--set", "pipeline.schedule=zbv")["plans"]:
        assert plan["plan"]["pipeline"]["schedule"] == "zbv"
        assert plan["plan"]["mesh"]["pp"] > 1


@pytest.mark.parametrize("key", ["data_parallel.strategy=dataparallel", "activations.policy=budget"])
def test_a_key_that_the_search_does_not_look_at_is_refused(key: str) -> None:
    found = told(*ASKED, "--set", key)
    assert found.code == 2
    assert "error [W103]" in found.err
    assert "hint:" in found.err


def test_a_budget_is_chosen_for_the_devices_and_written(tmp_path: Path) -> None:
    path, out = tmp_path / "plan.toml", tmp_path / "chosen.toml"
    mesh = "[mesh]\ndp_shard = 8\n[precision]\npreset = 'bf16'\n"
    path.write_text(mesh + "[compile]\nenabled = false\n[activations]\npolicy = 'budget'\n")
    asked = ("plan", "llama-3-8b", *EIGHT, "--global-batch", "16", "--sequence-length", "8192", "--plan", str(path))
    found = answer(*asked, "--out", str(out))["plans"][0]
    assert found["fits"]
    mixture = found["plan"]["activations"]["mixture"]
    assert 0 < mixture[0] < sum(mixture) <= 32
    assert Plan.from_file(out).activations.mixture == tuple(mixture)
    assert answer(*asked[:-1], str(out))["plans"][0]["memory"] == found["memory"]


def test_a_mixture_for_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[mesh]\ndp_shard = 8\n[activations]\npolicy = 'budget'\nmixture = [30, 30]\n")
    found = told(*ASKED, "--plan", str(path))
    assert found.code == 2
    assert "error [W201]" in found.err
    assert "at most 32" in found.err


def test_an_offloaded_plan_says_host_memory_copies_and_wear() -> None:
    offload = ("--set", "offload.optimizer=nvme", "--set", "data_parallel.zero=3", "--set", "mesh.tp=1")
    found = answer(*ASKED, *offload, "--top", "1")["plans"][0]
    assert found["disk"]["bytes_per_node"] == 12 * 8_030_261_248
    assert found["disk"]["written_bytes_per_step"] == 12 * 8_030_261_248
    assert found["host"]["terms"] == {"staging": found["host"]["bytes_per_rank"]}
    text = " ".join(told(*ASKED, *offload, "--top", "1").out.split())
    assert "wear: 89.7 GiB written per step and node" in text
    assert "per day of training" in text
    assert re.search(r"update on the (device|host): \d+.* not hidden", text)
    assert "host and disk" not in told(*ASKED, "--top", "1").out


def test_host_memory_can_be_given() -> None:
    offload = ("--set", "offload.optimizer=cpu", "--top", "1")
    assert answer(*ASKED, *offload)["num_fitting"] > 0
    assert answer(*ASKED, *offload, "--host-memory", "8GB", code=1)["num_fitting"] == 0
    assert "not a size" in told(*ASKED, "--host-memory", "much").err


def test_the_largest_model_of_a_family() -> None:
    asked = ("plan", "--largest", "llama", "--devices", "1xH200", "--host-memory", "128GB", "--sequence-length", "2048")
    found = answer(*asked)
    assert found["devices"]["host_memory_bytes"] == 128 * 10**9
    sizes = [one["parameters"] for one in found["largest"]]
    assert sizes[0] > 8e9
    assert sizes[1] > sizes[0]
    assert "optimizer states on the host" in " ".join(told(*asked).out.split())
    assert told("plan", "llama-3-8b", *asked[1:]).code == 2


@pytest.mark.parametrize("asked", [("--largest", "llama"), ("llama-3-8b", "--longest")], ids=["largest", "longest"])
@pytest.mark.parametrize(
    ("further", "words"),
    [
        (("--trains",), "cannot be combined with --trains"),
        (("--set", "mesh.dp=2"), "'dp'"),
        (("--set", "pipeline.blocks=[1,2]"), "[W103]: --set: the search does not vary pipeline.blocks"),
    ],
)
def test_what_replaces_the_search_refuses_what_it_does_not_read(
    asked: tuple[str, ...], further: tuple[str, ...], words: str
) -> None:
    refused = told("plan", *asked, "--devices", "1xH200", *further)
    assert (refused.code, words in refused.err) == (2, True), refused.err


def test_the_longest_rows_of_a_model() -> None:
    asked = ("plan", "llama-3-8b", "--devices", "4xH100-80GB", "--longest", "--set", "mesh.cp=4")
    (found,) = answer(*asked)["longest"]
    assert (found["cp"], found["best"]["fits"]) == (4, True)
    shown = " ".join(told(*asked).out.split())
    assert f"{found['sequence_length']:,}" in shown
    assert "8,192 positions" in shown
    refused = told(*asked, "--sequence-length", "64")
    assert (refused.code, "--longest cannot be combined with --sequence-length" in refused.err) == (2, True)
    assert answer("plan", "llama-3-70b", "--devices", "1xT4", "--longest", code=1)["longest"][0]["best"] is None
