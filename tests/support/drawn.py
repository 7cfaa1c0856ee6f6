"""Combinations of features drawn from a seed: a run and a plan that nobody listed. No torch, nothing is resolved here.

    case = draw_case(seed, corpus, chats)        # the tables of run.toml and plan.toml, the number of ranks

A draw is a mesh and a few features, each with the keys that a user would set for it. Most draws are legal, or become so
by following hints (`follow`).
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from weft.schedule import NAMES

Tables = dict[str, Any]
ROTARY: Tables = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SMALL_HEAD: Tables = {**ROTARY, "head_dim": 8}
WINDOWS: Tables = {"query_pre_attn_scalar": 8, "sliding_window": 8}
LAYERS = {"gpt2": "n_layer"}  # the key of the depth, where it is not num_hidden_layers
MODELS: dict[str, Tables] = {
    "llama": {"type": "llama", "config": ROTARY},
    "llama-tied": {"type": "llama", "config": {**ROTARY, "tie_word_embeddings": True}},
    "llama-odd": {"type": "llama", "config": {**ROTARY, "vocab_size": 259}},
    "llama-wide": {"type": "llama", "config": {**ROTARY, "hidden_size": 64, "intermediate_size": 128}},
    "qwen3-tied": {"type": "qwen3", "config": {**SMALL_HEAD, "tie_word_embeddings": True}},
    "gpt2": {"type": "gpt2", "config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}},
    "opt": {
        "type": "opt",
        "config": {
            "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32,
        },
    },
    "phi3": {"type": "phi3", "config": {**ROTARY, "pad_token_id": 0}},
    "gemma2": {"type": "gemma2", "config": {**SMALL_HEAD, **WINDOWS}},
    "gemma3_text": {"type": "gemma3_text", "config": {**SMALL_HEAD, **WINDOWS}},
    "gpt_oss": {
        "type": "gpt_oss",
        "config": {**SMALL_HEAD, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "mixtral": {"type": "mixtral", "config": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2}},
    "qwen3_moe": {
        "type": "qwen3_moe",
        "config": {**SMALL_HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    },
    "deepseek_v3": {
        "type": "deepseek_v3",
        "config": {
            **ROTARY, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        },
    },
}  # fmt: skip
EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3")
MESHES: dict[int, tuple[Tables, ...]] = {
    1: ({},),
    2: (
        *({"dp_replicate": 2}, {"dp_shard": 2}, {"dp_shard": 2}, {"cp": 2}, {"tp": 2}, {"pp": 2}),
        *({"dp_shard": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"tp": 2, "ep": 2}),
    ),
    4: (
        *({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 4}, {"pp": 4}, {"cp": 4}),
        *({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}),
        *({"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}),
        *({"dp_shard": 2, "pp": 2}, {"dp_replicate": 2, "pp": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}),
        *({"cp": 2, "tp": 2}, {"dp_shard": 4, "ep": 2}, {"dp_shard": 4, "ep": 4}, {"dp_shard": 2, "tp": 2, "ep": 2}),
        *({"dp_shard": 2, "cp": 2, "ep": 2}, {"dp_shard": 2, "pp": 2, "ep": 2}),
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    ),
}  # fmt: skip
SCHEDULE_STAGES = {"interleaved_1f1b": 2, "looped_bfs": 2, "zbv": 2, "dualpipev": 2}
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """What was drawn."""

    seed: int
    run: Tables
    plan: Tables
    features: tuple[str, ...] = field(default=())

    @property
    def num_ranks(self) -> int:
        return math.prod(size for axis, size in self.plan["mesh"].items() if axis != "ep")


class Draw:
    """The tables of a case while it is drawn."""

    def __init__(self, seed: int, corpus: str, chats: str) -> None:
        self.random = random.Random(f"weft {seed}")
        self.corpus, self.chats = corpus, chats
        self.model = ""
        self.run: Tables = {}
        self.plan: Tables = {}

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def of_plan(self, section: str, **keys: Any) -> None:
        self.plan.setdefault(section, {}).update(keys)

    def of_run(self, section: str, **keys: Any) -> None:
        self.run.setdefault(section, {}).update(keys)


def draw_case(seed: int, corpus: str, chats: str, *, ranks: tuple[int, ...] = (1, 2, 2, 2, 4, 4)) -> Case:
    """The case of a seed. `corpus`: a folder of texts, `chats`: a JSONL file of chats."""
    draw = Draw(seed, corpus, chats)
    _draw_mesh(draw, draw.one(*ranks))
    _draw_model(draw)
    _draw_rows(draw)
    chosen = draw.random.sample(sorted(FEATURES), draw.one(0, 1, 2, 2, 3, 3, 4, 5))
    for name in chosen:
        FEATURES[name](draw)
    return Case(seed, draw.run, draw.plan, tuple(chosen))


def _draw_mesh(draw: Draw, num_ranks: int) -> None:
    mesh = draw.one(*MESHES[num_ranks])
    draw.of_plan("mesh", **mesh)
    if {"dp_shard", "cp"} & set(mesh) or draw.random.random() < 0.2:
        draw.of_plan("data_parallel", zero=draw.one(*((1, 2, 3, 3) if "dp_shard" in mesh else (0, 1, 2, 3))))
    if draw.random.random() < 0.5:
        draw.of_plan("pipeline", microbatches=draw.one(2, 4))
    if "pp" in mesh:
        schedule = draw.one(*NAMES, "1f1b")
        stages = SCHEDULE_STAGES.get(schedule, 1)
        draw.of_plan("pipeline", schedule=schedule, virtual_stages=stages, microbatches=draw.one(4, 4, 8))
        if schedule == "pipedream" and draw.random.random() < 0.5:
            draw.of_plan("pipeline", vertical_sync=True)
    if "tp" in mesh:
        grids = ("2d",) if mesh["tp"] == 4 else ()
        draw.of_plan("tensor_parallel", mode=draw.one("1d", "1d", *grids))
        draw.of_plan(
            "tensor_parallel", **{key: draw.one(True, False) for key in ("sequence_parallel", "loss_parallel")}
        )
    if "cp" in mesh:
        draw.of_plan("context_parallel", attention=draw.one("gather", "ring", "ulysses"))
        draw.of_plan("context_parallel", split=draw.one("zigzag", "contiguous"))
    if "ep" in mesh:
        draw.of_plan("expert_parallel", dispatcher=draw.one("auto", "pairs", "tokens", "gather"))
        if "tp" in mesh and draw.random.random() < 0.5:
            draw.of_plan("expert_parallel", tensor="width")


def _draw_model(draw: Draw) -> None:
    has_experts = "ep" in draw.plan["mesh"] or draw.random.random() < 0.15
    names = [name for name in MODELS if (name in EXPERTS) == has_experts]
    draw.model = draw.one(*names)
    model = deepcopy(MODELS[draw.model])
    stages = draw.plan["mesh"].get("pp", 1) * draw.plan.get("pipeline", {}).get("virtual_stages", 1)
    model["config"][LAYERS.get(model["type"], "num_hidden_layers")] = max(2, stages)
    draw.run["model"] = model


def _draw_rows(draw: Draw) -> None:
    mesh, pipeline = draw.plan["mesh"], draw.plan.get("pipeline", {})
    unit = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1) * pipeline.get("microbatches", 1)
    grid = 2 if draw.plan.get("tensor_parallel", {}).get("mode") == "2d" else 1
    draw.run["data"] = {
        "source": draw.corpus, "tokenizer": "bytes", "eval_fraction": 0.2,
        "sequence_length": draw.one(16, 16, 16, 24, 12, 13, 18),
    }  # fmt: skip
    draw.run["train"] = {
        "steps": 20, "global_batch": unit * grid * draw.one(1, 1, 2, 3), "learning_rate": draw.one(1e-3, 1e-2),
        "warmup_steps": draw.one(0, 2), "seed": draw.one(3, 4, 5), "clip_norm": draw.one(0.0, 1.0, 1.0),
    }  # fmt: skip


def _recompute(draw: Draw) -> None:
    policy = draw.one("full", "full", "selective", "budget")
    draw.of_plan("activations", policy=policy)
    if policy == "budget":
        draw.of_plan("activations", mixture=draw.one([1, 0], [0, 1], [1, 1]))
    if policy != "selective" and draw.random.random() < 0.3:
        draw.of_plan("activations", offload="cpu")
    if policy != "selective" and "tp" in draw.plan["mesh"] and draw.random.random() < 0.3:
        draw.of_plan("activations", partition=True)
        draw.of_plan("tensor_parallel", sequence_parallel=False)


def _offloaded_blocks(draw: Draw) -> None:
    draw.of_plan("activations", offload="cpu", offload_blocks=draw.one(1, 2))


def _offload(draw: Draw) -> None:
    draw.of_plan("offload", optimizer=draw.one("cpu", "cpu", "nvme"), update=draw.one("auto", "device", "host"))
    if draw.random.random() < 0.3:
        draw.of_plan("offload", masters="host")
        draw.of_plan("precision", preset="bf16")
    if draw.random.random() < 0.3:
        draw.of_plan("offload", parameters="cpu", optimizer="cpu")
    if draw.random.random() < 0.2:
        draw.of_plan("offload", staging_bytes=2**20, update="device")
    if draw.random.random() < 0.3:
        draw.of_plan("offload", chunk_elements=1024)


def _delayed(draw: Draw) -> None:
    draw.plan["offload"] = {"optimizer": "cpu", "delayed": True}


def _preset(draw: Draw) -> None:
    names = ("tf32", "fp16", "bf16", "bf16", "bf16-pure", "llama-3", "deepseek-v3", "gpt-oss")
    draw.of_plan("precision", preset=draw.one(*names))


def _component(draw: Draw) -> None:
    """One or two components that differ from the preset."""
    draw.of_plan("precision", preset="bf16")
    values = {
        "residual": ("float32",), "reduce": ("bfloat16", "int8", "float8_e4m3"), "gather": ("int8", "float8_e4m3"),
        "gradients": ("bfloat16",), "logits": ("float32",), "optimizer_state": ("bfloat16",),
        "first_moment": ("bfloat16",), "master_weights": ("bfloat16",), "router": DTYPES,
    }  # fmt: skip
    for name in draw.random.sample(sorted(values), draw.one(1, 1, 2)):
        draw.of_plan("precision", **{name: draw.one(*values[name])})


def _coded_sums(draw: Draw) -> None:
    draw.of_plan("precision", reduce=draw.one("bfloat16", "int8", "float8_e4m3"))
    if draw.random.random() < 0.4:
        draw.of_plan("data_parallel", error_feedback=True)


def _float8(draw: Draw) -> None:
    draw.plan["float8"] = {"linears": draw.one("all", "auto"), "recipe": draw.one(*_RECIPES)}
    if draw.random.random() < 0.3:
        draw.of_plan("float8", gather="weights")
    if draw.model in EXPERTS and draw.random.random() < 0.5:
        draw.of_plan("float8", experts="all")
    if draw.random.random() < 0.2:
        draw.of_plan("float8", measure_every=1)


_RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")


def _kernels(draw: Draw) -> None:
    draw.of_plan("kernels", loss="fused")


def _compile(draw: Draw) -> None:
    draw.of_plan("compile", enabled=True)


def _eager(draw: Draw) -> None:
    draw.of_run("model", attention="eager")


def _secondary(draw: Draw) -> None:
    draw.plan["mesh"] = draw.one({"dp_shard": 4}, {"dp_shard": 2, "cp": 2})
    draw.of_plan("data_parallel", zero=3, secondary_shard=2)
    draw.run["train"]["global_batch"] *= 4


def _all_reduce(draw: Draw) -> None:
    draw.of_plan("data_parallel", all_reduce=draw.one("ring", "star", "naive", "tree", "halving", "hierarchical"))


def _bucket(draw: Draw) -> None:
    draw.of_plan("data_parallel", bucket_bytes=2048)


def _blocks(draw: Draw) -> None:
    mesh, pipeline = draw.plan["mesh"], draw.plan.get("pipeline", {})
    stages = mesh.get("pp", 1) * pipeline.get("virtual_stages", 1)
    if stages > 1:
        draw.of_plan("pipeline", blocks=[2, *[1] * (stages - 1)])
        model = draw.run["model"]
        model["config"][LAYERS.get(model["type"], "num_hidden_layers")] = stages + 1


def _optimizer(draw: Draw) -> None:
    draw.of_run("train", optimizer=draw.one("adam", "sgd", "lion", "muon", "muon", "adafactor", "adamw8bit"))
    if draw.run["train"]["optimizer"] == "sgd":
        draw.of_run("train", momentum=draw.one(0.0, 0.9))


def _rates(draw: Draw) -> None:
    draw.of_run(
        "train", schedule=draw.one("linear", "constant", "wsd", "inverse_sqrt"), weight_decay=draw.one(0.0, 0.1)
    )


def _patterns(draw: Draw) -> tuple[str, ...]:
    """Names that the model has: norms, a block, the table of tokens."""
    return ("*ln_*", "*.0.*", "*wte*") if draw.model == "gpt2" else ("*norm*", "*.0.*", "*embed_tokens*")


def _groups(draw: Draw) -> None:
    group = draw.one({"learning_rate_ratio": 0.5}, {"weight_decay": 0.3}, {"learning_rate": 1e-3, "weight_decay": 0.0})
    draw.of_run("train", groups=[{"pattern": draw.one(*_patterns(draw)), **group}])


def _average(draw: Draw) -> None:
    draw.of_run("train", ema_decay=0.9)


def _frozen(draw: Draw) -> None:
    draw.of_run("train", frozen=[draw.one(*_patterns(draw))])


def _documents(draw: Draw) -> None:
    if draw.random.random() < 0.5:
        draw.of_run("data", packing="documents")
    else:
        draw.of_run("data", isolate_documents=True)


def _single_samples(draw: Draw) -> None:
    draw.of_run("data", packing="none", truncation=draw.one("end", "start", "drop", "split"))


def _chat(draw: Draw) -> None:
    draw.of_run(
        "data", source=draw.chats, format="prompt-completion", packing=draw.one("none", "concatenate", "documents")
    )
    for key in ("isolate_documents", "truncation"):
        draw.run["data"].pop(key, None)


def _router(draw: Draw) -> None:
    if draw.model not in EXPERTS:
        return
    keys: Tables = {"balance_loss": 0.05, "z_loss": 0.01, "capacity_factor": 1.0}
    draw.run["router"] = {key: keys[key] for key in draw.random.sample(sorted(keys), draw.one(1, 2))}
    if "balance_loss" in draw.run["router"]:
        draw.run["router"]["balance_over"] = draw.one("batch", "micro_batch", "transformers")
    if draw.model == "deepseek_v3" and draw.random.random() < 0.5:
        draw.run["router"]["bias_rate"] = 0.001


def _wire(draw: Draw) -> None:
    draw.of_plan("expert_parallel", wire="float8", chunks=draw.one(1, 2))


def _adapter(draw: Draw) -> None:
    draw.run["adapter"] = {"kind": "lora", "rank": draw.one(2, 4), "base": draw.one("model", "bfloat16", "int8", "nf4")}
    if draw.run["adapter"]["base"] != "model":
        draw.of_plan("precision", preset="bf16")
    if draw.random.random() < 0.3:
        draw.run["adapter"]["dropout"] = 0.1
    if draw.random.random() < 0.2:
        draw.run["adapter"]["train_also"] = [_patterns(draw)[0]]


def _elastic(draw: Draw) -> None:
    draw.of_plan("data_parallel", elastic=True)


FEATURES: dict[str, Callable[[Draw], None]] = {
    "recompute": _recompute, "offloaded blocks": _offloaded_blocks, "offload": _offload, "delayed": _delayed,
    "preset": _preset, "component": _component, "coded sums": _coded_sums, "float8": _float8, "fused loss": _kernels,
    "compile": _compile, "eager": _eager, "secondary": _secondary, "all-reduce": _all_reduce, "buckets": _bucket,
    "blocks": _blocks, "optimizer": _optimizer, "rates": _rates, "groups": _groups, "average": _average,
    "frozen": _frozen, "documents": _documents, "single samples": _single_samples, "chat": _chat, "router": _router,
    "wire": _wire, "adapter": _adapter, "elastic": _elastic,
}  # fmt: skip

_SETTING = re.compile(
    r"(?:set|use|verify with|remove|leave out) ([a-z_0-9]+\.[a-z_0-9]+)(?: (?:=|to) (\[[^\]]*\]|'[^']*'|[\w.+-]+))?"
)


def setting_of(hint: str) -> tuple[str, str, Any] | None:
    """(section, key, value) of the first setting that a hint names in full; the value None where it says `remove`."""
    for found in _SETTING.finditer(hint):
        section, key = found[1].split(".")
        if found[2] is None:
            if found[0].startswith(("remove", "leave out")):
                return section, key, None
            continue
        try:
            return section, key, tomllib.loads(f"value = {found[2]}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return None


def follow(case: Case, hint: str) -> Case | None:
    """The case with what the hint says; None if it names no setting in full."""
    named = setting_of(hint)
    if named is None:
        return None
    section, key, value = named
    run, plan = deepcopy(case.run), deepcopy(case.plan)
    tables = run if section in RUN_SECTIONS else plan
    if value is None:
        tables.get(section, {}).pop(key, None)
    else:
        tables.setdefault(section, {})[key] = value
    return Case(case.seed, run, plan, case.features)


RUN_SECTIONS = ("model", "data", "train", "router", "adapter", "objective", "checkpoint", "samples")
