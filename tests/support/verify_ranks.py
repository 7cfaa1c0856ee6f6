"""Verifications inside the ranks of a test: small runs as tables, one session for several plans or mutations.

A session's references are computed before anything is mutated; so only the plan's side is ever wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.core.plan import Plan
from weft.core.quiet import quiet_libraries
from weft.core.run_spec import RunSpec
from weft.data import open_corpus
from weft.plan.resolve import resolve
from weft.train.ranks.process import Process, join, leave
from weft.verify.session import Session

Tables = dict[str, Any]
Mutation = Callable[[], AbstractContextManager[None]]
ROTARY: Tables = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_GPT2: Tables = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}  # drops 0.1 everywhere
MODELS: dict[str, Tables] = {
    "llama": {"type": "llama", "config": ROTARY},
    "qwen3-tied": {"type": "qwen3", "config": {**ROTARY, "head_dim": 8, "tie_word_embeddings": True}},
    "gpt2": {"type": "gpt2", "config": _GPT2},
    "mixtral": {"type": "mixtral", "config": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2}},
    "gemma2": {"type": "gemma2", "config": {**ROTARY, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}},
    # wide enough that an 8-bit optimizer quantises its moments
    "llama-wide": {"type": "llama", "config": {**ROTARY, "hidden_size": 64, "intermediate_size": 128}},
    "olmo2": {"type": "olmo2", "config": ROTARY},
}
# beside those that the campaign of healthy runs draws from
OTHERS: dict[str, Tables] = {
    "phi3": {"type": "phi3", "config": {**ROTARY, "pad_token_id": 0}},
    "llama-dropped": {"type": "llama", "config": {**ROTARY, "attention_dropout": 0.1}},
    "gpt2-stream": {"type": "gpt2", "config": {**_GPT2, "attn_pdrop": 0.0}},
    "gpt2-eager": {"type": "gpt2", "attention": "eager", "config": _GPT2},
    "opt": {
        "type": "opt",
        "config": {
            "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "attention_dropout": 0.1, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
        },
    },
    # another table of rotary frequencies for rows beyond 12 tokens
    "phi3-longrope": {
        "type": "phi3",
        "config": {
            **ROTARY, "pad_token_id": 0, "max_position_embeddings": 64, "original_max_position_embeddings": 12,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 12, "factor": 4.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
            },
        },
    },
    "llama-odd": {"type": "llama", "config": {**ROTARY, "vocab_size": 259}},  # a vocabulary of unequal slices
    # a bias of the choice, groups of experts, a dense block
    "deepseek_v3": {
        "type": "deepseek_v3",
        "config": {
            **ROTARY, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        },
    },
    # two tensor-parallel ranks have whole blocks of 128 features
    "llama-blocks": {
        "type": "llama",
        "config": {**ROTARY, "hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4},
    },
    "gpt_oss": {
        "type": "gpt_oss",
        "config": {
            **ROTARY, "head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
    "llama-deep": {"type": "llama", "config": {**ROTARY, "num_hidden_layers": 4}},  # two stages on each of two ranks
}  # fmt: skip


def small_run(
    corpus: str,
    *,
    model: str = "llama",
    train: Tables | None = None,
    data: Tables | None = None,
    router: Tables | None = None,
    objective: Tables | None = None,
) -> Tables:
    """The tables of a run of a few thousand weights over `corpus`."""
    settings: Tables = {"steps": 20, "global_batch": 8, "learning_rate": 1e-2, "warmup_steps": 2, "seed": 3}
    return {
        "model": {**MODELS, **OTHERS}[model],
        "data": {"source": corpus, "tokenizer": "bytes", "sequence_length": 16, "eval_fraction": 0.2, **(data or {})},
        "train": {**settings, **(train or {})},
        "router": router or {},
        "objective": objective or {},
    }


@contextmanager
def joined(scratch: str) -> Iterator[Process]:
    """This rank among those that are here; `scratch` is an empty folder."""
    os.environ["XDG_CACHE_HOME"] = str(Path(scratch, "cache"))
    quiet_libraries()
    yield join(device_type="cpu", timeout_s=300.0)
    leave()


def session_of(run: Tables, process: Process, scratch: str, *, steps: int) -> Session:
    spec = RunSpec.from_tables(run)
    if process.is_main:
        open_corpus(spec.data)
    if process.world_size > 1:
        dist.barrier()
    Path(scratch).mkdir(exist_ok=True)
    return Session(spec, process, steps=steps, scratch=Path(scratch), device=torch.device("cpu"))


@contextmanager
def open_session(run: Tables, scratch: str, *, steps: int) -> Iterator[Session]:
    """A session on the ranks that are here."""
    with joined(scratch) as process:
        yield session_of(run, process, scratch, steps=steps)


def verdicts_of_many_in_rank(
    rank: int, _world: int, cases: dict[str, tuple[Tables, Tables]], scratch: str, steps: int = 4
) -> dict[str, Tables]:
    """The verdict on each (run, plan) by name, on rank 0. One start of the ranks for all of them."""
    verdicts: dict[str, Tables] = {}
    with joined(scratch) as process:
        for index, (name, (run, plan)) in enumerate(cases.items()):
            session = session_of(run, process, f"{scratch}/{index}", steps=steps)
            verdicts[name] = session.verify(Plan.from_tables(plan)).as_dict()
            print(f"{name}: {'ok' if verdicts[name]['ok'] else verdicts[name]['first_wrong']}", flush=True)
    return verdicts if rank == 0 else {}


def verdicts_in_rank(
    rank: int, _world: int, run: Tables, plans: list[Tables], scratch: str, steps: int = 4
) -> list[Tables]:
    """One verdict a plan, as JSON, on rank 0."""
    with open_session(run, scratch, steps=steps) as session:
        verdicts = [session.verify(Plan.from_tables(plan)).as_dict() for plan in plans]
    return verdicts if rank == 0 else []


def mutated_verdicts_in_rank(
    rank: int, run: Tables, plan: Tables, scratch: str, mutations: dict[str, Mutation], steps: int = 4
) -> dict[str, Tables]:
    """The verdict on each mutation by name, and under "" that on the code as it is, which comes first."""
    with open_session(run, scratch, steps=steps) as session:
        verdicts = {}
        for name, mutation in {"": nullcontext, **mutations}.items():
            with mutation():
                verdicts[name] = session.verify(Plan.from_tables(plan), until_wrong=name != "").as_dict()
    return verdicts if rank == 0 else {}


def verdict_in_rank(
    rank: int, _world: int, run: Tables, plan: Tables, scratch: str, steps: int, stages: list[str]
) -> Tables:
    """The verdict on a plan as `weft verify --as-is` resolves it, after these stages; on rank 0."""
    with joined(scratch) as process:
        resolved = resolve(plan, RunSpec.from_tables(run), on_gpu=False)
        session = session_of(run, process, scratch, steps=steps)
        verdict = session.verify(resolved, stages=stages)
    return verdict.as_dict() if rank == 0 else {}
