"""The cases of gpu_step.py and the bars they are held against: models, batches, plans, peers. Data only, no torch.

A group is what is compared: one model, one batch, weft and its peers. `fake8` is rank 0 of 8 with collectives that are
copies in its own memory (weft.comm.loopback), on both sides; `single` is one GPU and no group at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dryrun_cases import shrunk
from shapes import GEMMA2, LLAMA_1B, LLAMA_8B, MIXTRAL, PHI3, QWEN3_30B_8L

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {"model_type": "llama", **LLAMA_1B, "head_dim": 64, "tie_word_embeddings": False},
    "llama-3-8b": {"model_type": "llama", **LLAMA_8B, "head_dim": 128, "tie_word_embeddings": False},
    "gemma2": {"model_type": "gemma2", **GEMMA2},  # 1.5 B parameters, soft-capped scores, head_dim 256
    "mixtral": {"model_type": "mixtral", **MIXTRAL},  # 1.5 B parameters, 8 experts of which 2
    "qwen3-30b-8l": {"model_type": "qwen3_moe", **QWEN3_30B_8L},  # 8 of 48 layers, 128 experts of which 8
    "phi3": {"model_type": "phi3", **PHI3, "num_hidden_layers": 10},  # 1.3 B parameters, fused projections
}
TINY_ROWS, TINY_SEQUENCE = 2, 32

BF16 = {"precision": {"preset": "bf16"}, "compile": {"enabled": True}, "kernels": {"loss": "fused"}}
FAKE8 = {**BF16, "mesh": {"dp_shard": 8}, "data_parallel": {"zero": 2}}  # weights stay gathered: memory is there
EXPERTS8 = {**FAKE8, "mesh": {"dp_shard": 8, "ep": 8}}
FLOAT8 = {**FAKE8, "float8": {"linears": "all"}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process: `peer` are arguments of gpu_peers.py, `plan` the tables of a plan.toml; one of the two."""

    name: str
    estimate_s: float  # the whole process, until there is an earlier one to go by
    peer: tuple[str, ...] | None = None
    plan: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """`case` over `against`: tokens/s at least `speed`, peak of allocated memory at most `memory`."""

    case: str
    against: str
    speed: float
    memory: float | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """`one_bar_is_enough`: the bars are alternatives."""

    name: str
    shape: str
    rows: int  # of one rank
    sequence: int
    cases: tuple[Case, ...]
    bars: tuple[Bar, ...]
    steps: int = 8
    warmup: int = 3
    one_bar_is_enough: bool = False

    def case(self, name: str) -> Case:
        return next(case for case in self.cases if case.name == name)


def peer(kind: str, estimate_s: float, *arguments: str, name: str | None = None) -> Case:
    return Case(name=name or kind, estimate_s=estimate_s, peer=("--peer", kind, *arguments))


def weft(estimate_s: float, plan: dict[str, Any], *, name: str = "weft") -> Case:
    return Case(name=name, estimate_s=estimate_s, plan=plan)


def family(shape: str, *peers: Case, sequence: int = 4096) -> Group:
    bars = tuple(Bar(case="weft", against=one.name, speed=1.3) for one in peers)
    first, *rest = peers
    return Group(
        name=f"family-{shape}", shape=shape, rows=4, sequence=sequence, cases=(first, weft(50, BF16), *rest), bars=bars,
        steps=6,
    )  # fmt: skip


GROUPS = (
    Group(
        name="1b-fake8", shape="llama-3.2-1b", rows=4, sequence=4096,
        cases=(peer("torchtitan", 40), weft(45, FAKE8), peer("fsdp2", 25)),
        bars=(Bar(case="weft", against="torchtitan", speed=1.10, memory=1.0),),
    ),
    Group(
        name="8b-fake8-bf16", shape="llama-3-8b", rows=2, sequence=8192,
        cases=(
            peer("torchtitan", 55, "--recompute", "selective"),
            weft(60, FAKE8),
        ),
        bars=(
            Bar(case="weft", against="torchtitan", speed=1.12, memory=1.0),
            Bar(case="weft", against="torchtitan", speed=1.15),
        ),
        steps=5, one_bar_is_enough=True,
    ),
    Group(
        name="8b-fake8-float8", shape="llama-3-8b", rows=2, sequence=8192,
        cases=(peer("torchtitan", 65, "--recompute", "selective", "--float8"), weft(65, FLOAT8)),
        bars=(Bar(case="weft", against="torchtitan", speed=1.12),), steps=5,
    ),
    Group(
        name="1b-single", shape="llama-3.2-1b", rows=4, sequence=4096,
        cases=(peer("accelerate", 30), weft(45, BF16), peer("lightning", 30), peer("eager", 30)),
        bars=(
            Bar(case="weft", against="accelerate", speed=1.45, memory=0.5),
            Bar(case="weft", against="lightning", speed=1.45, memory=0.5),
        ),
    ),
    Group(
        name="experts-fake8", shape="qwen3-30b-8l", rows=4, sequence=4096,
        cases=(
            peer("torchtitan", 90, "--ep", "8"),
            *(
                weft(90, {**EXPERTS8, "expert_parallel": {"dispatcher": kind}}, name=f"weft-{kind}")
                for kind in ("pairs", "tokens", "gather")
            ),
            weft(90, FAKE8, name="weft-ep1"),
            peer("torchtitan", 90, name="torchtitan-ep1"),
        ),
        bars=(
            *(Bar(case=f"weft-{kind}", against="torchtitan", speed=1.3) for kind in ("pairs", "tokens", "gather")),
            Bar(case="weft-ep1", against="torchtitan-ep1", speed=1.3),
        ),
        steps=6, one_bar_is_enough=True,
    ),
    # HF's sdpa leaves the soft cap out, so its loop has to take eager attention, whose scores bound the sequence
    family("gemma2", peer("eager", 35, "--attention", "eager"), sequence=2048),
    # HF's grouped product is not under autocast and multiplies in fp32: its loop over experts is the stronger peer
    family("mixtral", peer("eager", 35), peer("eager", 35, "--experts", "eager", name="eager-loop-of-experts")),
    family("phi3", peer("eager", 35)),
)  # fmt: skip


def config_of(group: Group, *, tiny: bool) -> dict[str, Any]:
    return shrunk(SHAPES[group.shape]) if tiny else SHAPES[group.shape]


def plan_tables(case: Case, *, tiny: bool) -> dict[str, Any]:
    """A CPU compiles for minutes what it then runs in seconds: tiny cases are not compiled."""
    if case.plan is None:
        raise ValueError(f"{case.name} is a peer and has no plan")
    return {**case.plan, "compile": {"enabled": False}} if tiny else case.plan


def run_tables(group: Group, case: Case, *, tiny: bool) -> dict[str, Any]:
    config = config_of(group, tiny=tiny)
    rows, sequence = (TINY_ROWS, TINY_SEQUENCE) if tiny else (group.rows, group.sequence)
    mesh = plan_tables(case, tiny=tiny).get("mesh", {})
    return {
        "model": {"type": config["model_type"], "config": {k: v for k, v in config.items() if k in _toml_keys(config)}},
        "data": {"sequence_length": sequence},
        "train": {
            "global_batch": rows * mesh.get("dp_shard", 1), "steps": group.warmup + group.steps, "learning_rate": 1e-4,
            "betas": [0.9, 0.95], "weight_decay": 0.1, "clip_norm": 1.0, "schedule": "constant", "warmup_steps": 0,
        },
    }  # fmt: skip


def _toml_keys(config: dict[str, Any]) -> set[str]:
    """TOML has no null: keys that are None keep HF's default, which for `sliding_window` of these families is None."""
    return {key for key, value in config.items() if key != "model_type" and value is not None}
