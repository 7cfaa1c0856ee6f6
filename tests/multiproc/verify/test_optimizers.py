"""Every optimizer of its own kind passes all checks on every layout; bugs of its sharding do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optimizer_mutations as bugs
import pytest
from gloo_ranks import run_ranks
from mutation_groups import Bug, Group, require_caught
from verify_ranks import Tables, small_run, verdicts_of_many_in_rank

LIMIT_S = 1500
ZERO_1 = {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 1}, "pipeline": {"microbatches": 2}}
ZERO_2 = {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}}
ZERO_3 = {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3}}
HSDP = {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}}
TENSOR = {"mesh": {"dp_shard": 2, "tp": 2}, "data_parallel": {"zero": 2}}
PIPELINE = {
    "mesh": {"dp_shard": 2, "pp": 2}, "data_parallel": {"zero": 1},
    "pipeline": {"schedule": "1f1b", "microbatches": 2},
}  # fmt: skip
EXPERTS = {"mesh": {"dp_shard": 4, "ep": 2}, "data_parallel": {"zero": 3}}
DDP = {"mesh": {"dp_replicate": 4}}
SCHEDULE_FREE = {"optimizer": "schedule_free", "schedule": "constant"}
GROUPS = [
    {"pattern": "*embed_tokens*", "learning_rate_ratio": 0.5, "weight_decay": 0.0},
    {"pattern": "*norm*", "learning_rate": 2e-3, "weight_decay": 0.05},
]

LAYOUTS = {
    "DDP": ("llama", DDP), "ZeRO-1": ("gpt2", ZERO_1), "ZeRO-2": ("qwen3-tied", ZERO_2), "ZeRO-3": ("llama", ZERO_3),
    "HSDP": ("llama", HSDP), "tp": ("llama", TENSOR), "tp, fused": ("phi3", TENSOR), "pp": ("llama", PIPELINE),
    "ep": ("mixtral", EXPERTS), "tp of a tie": ("qwen3-tied", {"mesh": {"tp": 4}}),
}  # fmt: skip


def _require_green(cases: dict[str, tuple[Tables, Tables]], scratch: Path) -> None:
    verdicts = run_ranks(verdicts_of_many_in_rank, 4, cases, str(scratch), 3, timeout_s=LIMIT_S)[0]
    assert {name: verdict["first_wrong"] for name, verdict in verdicts.items()} == dict.fromkeys(cases)
    for name, verdict in verdicts.items():
        details = {check["name"]: check["detail"] for check in verdict["checks"]}
        assert "not judged" not in details["collectives"], (name, details["collectives"])
        if cases[name][0]["train"]["optimizer"] != "adafactor":  # its states do not show the gradients
            assert "not judged" not in details["oracle update"], (name, details["oracle update"])


def _cases(corpus: Path, names: Any, train: Tables) -> dict[str, tuple[Tables, Tables]]:
    rate = {"learning_rate": 3e-3, "weight_decay": 0.1}
    return {
        name: (small_run(str(corpus), model=LAYOUTS[name][0], train=rate | train), LAYOUTS[name][1]) for name in names
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        {"optimizer": "muon"},
        {"optimizer": "muon", "muon_precision": "bfloat16", "muon_scale": "original"},
        {"optimizer": "adafactor", "ema_decay": 0.9},
        {"optimizer": "lion", "groups": GROUPS, "schedule": "wsd"},
        SCHEDULE_FREE | {"groups": GROUPS},
    ],
    ids=lambda train: "-".join(str(value) for value in train.values())[:30],
)
def test_every_layout_passes(train: Tables, corpus: Path, tmp_path: Path) -> None:
    names = [name for name in LAYOUTS if "groups" not in train or LAYOUTS[name][0] in ("llama", "qwen3-tied")]
    _require_green(_cases(corpus, names, train), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lion", "adafactor"])
def test_fused_layers_experts_and_shared_rows(optimizer: str, corpus: Path, tmp_path: Path) -> None:
    """Lion without groups: the layouts that its groups by pattern leave out."""
    _require_green(_cases(corpus, ("ZeRO-1", "tp, fused", "ep"), {"optimizer": optimizer}), tmp_path)


@pytest.mark.slow
def test_schedule_free_with_fused_layers_and_experts(corpus: Path, tmp_path: Path) -> None:
    _require_green(_cases(corpus, ("ZeRO-1", "tp, fused", "ep"), SCHEDULE_FREE), tmp_path)


@pytest.mark.extended
def test_muon_and_adafactor_on_a_few_layouts(corpus: Path, tmp_path: Path) -> None:
    muon = _cases(corpus, ("ZeRO-1", "tp, fused"), {"optimizer": "muon", "ema_decay": 0.9})
    _require_green(muon | _cases(corpus, ("ep",), {"optimizer": "adafactor"}), tmp_path)


BUGS: dict[str, Group] = {
    "muon": Group(
        plan={"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
        train={"optimizer": "muon"},
        bugs=(
            Bug(mutate=bugs.newton_schulz_of_the_shard, check="first update", words=("weight",), step=1),
            Bug(mutate=bugs.matrix_of_another_owner, check="first update", words=("weight",), step=1),
        ),
    ),
    "adafactor": Group(
        plan={"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
        train={"optimizer": "adafactor"},
        bugs=(Bug(mutate=bugs.means_of_the_shard, check="first update", words=("weight",), step=1),),
    ),
    "schedule_free": Group(
        plan={"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
        train=SCHEDULE_FREE,
        bugs=(
            Bug(mutate=bugs.trained_weights_are_evaluated, check="evaluation"),
            Bug(mutate=bugs.steps_weigh_alike_on_one_rank, check=("gradient norm", "loss", "weights"), step=3),
        ),
    ),
    "average": Group(
        plan={"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
        train={"ema_decay": 0.9},
        bugs=(Bug(mutate=bugs.average_before_the_update_on_one_rank, check="optimizer state", words=("ema",)),),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BUGS))
def test_every_bug_is_caught(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(BUGS[name], corpus, tmp_path)
