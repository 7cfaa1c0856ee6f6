"""Which causal LM types of the installed transformers train: each is built tiny from its config and takes two steps.

    python benchmarks/families_train.py --out benchmarks/results/families_train-DATE.md [--only llama gpt2 ...]

The path is the one of `weft train`: config, skeleton on meta, initial weights, engine under ZeRO-3 on one process.
It says nothing about speed or quality. A type is `trained`, `refused` (weft said why in a sentence) or `failed`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import math
import platform
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

CPU = torch.device("cpu")
VOCABULARY, ROWS, LENGTH, LIMIT_S = 257, 2, 16, 90

# Size fields by the names configs give them; a field a config does not have is left out.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "dim_model": 64, "emb_dim": 64, "embedding_size": 64,
    "embed_dim": 64, "word_embed_proj_dim": 64, "n_ctx": 64, "hidden_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "d_ff": 96, "dim_ff": 96, "dff": 96, "ffn_hidden_size": 96,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "dense_intermediate_size": 96, "feed_forward_size": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "shared_intermediate_size": 32, "intermediate_size_mlp": 96, "moe_shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "num_blocks": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_key_value_heads": 4, "num_kv_heads": 4, "head_dim": 16, "dim_head": 16, "attention_head_dim": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "zero_expert_num": 2,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "qk_head_dim": 16, "rotary_dim": 8, "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64,
    "mamba_d_state": 16, "state_size": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_head_dim": 16, "linear_num_heads": 4, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "index_n_heads": 4, "index_head_dim": 16,
    "max_length": 64, "attention_hidden_size": 64, "lru_width": 64, "is_decoder": True,
    "vocab_size_per_layer_input": 320, "moe_k": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_topk_expert": 2,
}  # fmt: skip

DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
    "num_encoder_layers", "num_blocks",
)  # fmt: skip

# What a family of two layers asks for beyond smaller sizes.
EXTRA: dict[str, dict[str, Any]] = {
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 4], "attn_layers": ["local", "local"],
                 "local_attn_chunk_length": 8, "num_buckets": 4},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "cohere_compass_text": {"layer_types": ["full_attention", "full_attention"]},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
                     "activation_sparsity_pattern": [0.0, 0.0], "vocab_size_per_layer_input": 320},
    "gemma4_text": {"vocab_size_per_layer_input": 320},
    "xlm": {"causal": True},
    "longcat_flash": {"head_dim": 8},
    "mimo_v2_flash": {"head_dim": 24},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    model_type: str
    kind: str  # trained | refused | failed
    reason: str = ""
    blocks: int = 0
    parameters: int = 0
    by_rule: int = 0
    seconds: float = 0.0


def shrunk(config_class: Any, *, num_layers: int = 2) -> dict[str, Any]:
    """Overrides that make a config of this class tiny, one level of nested text config included."""
    try:
        defaults = config_class().to_dict()
    except Exception:  # a class without defaults: weft's own sentence about it is what counts
        return {}
    fields = {key: num_layers if key in DEPTHS else SIZES[key] for key in SIZES if key in defaults}
    if "qk_rope_head_dim" in fields:
        fields.pop("head_dim", None)  # these families derive it
    depth = defaults.get("num_hidden_layers")
    for key, value in defaults.items():  # one entry a layer: keep the first ones
        if isinstance(value, list) and len(value) == depth:
            fields[key] = value[:num_layers]
    for key, nested in defaults.items():
        if key.endswith("_config") and isinstance(nested, dict) and nested.get("model_type") in CONFIG_MAPPING:
            fields[key] = {
                **shrunk(CONFIG_MAPPING[nested["model_type"]], num_layers=num_layers),
                **({"vocab_size": 320} if "vocab_size" in nested else {}),
            }
    return fields


def try_type(model_type: str) -> Outcome:
    """Two steps of one tiny model."""
    began_s = time.perf_counter()
    try:
        with time_limit(LIMIT_S):
            facts = _train(model_type)
        return Outcome(model_type=model_type, kind="trained", seconds=time.perf_counter() - began_s, **facts)
    except WeftError as error:
        kind, reason = "refused", f"{error.code} {error}"
    except Exception as error:  # the point is to list whatever goes wrong
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        kind, reason = "failed", f"{type(error).__name__}: {first}"
    return Outcome(model_type=model_type, kind=kind, reason=reason, seconds=time.perf_counter() - began_s)


def _train(model_type: str) -> dict[str, Any]:
    overrides = shrunk(CONFIG_MAPPING[model_type]) | EXTRA.get(model_type, {})
    config = build_config(ModelSpec(type=model_type, config=overrides), vocab_size=VOCABULARY, end_of_document=256)
    skeleton = build_skeleton(config)
    if sum(parameter.numel() for parameter in skeleton.parameters()) > 50_000_000:
        raise RuntimeError("this script's size fields do not make it small")
    weights = InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU)
    engine = Engine(
        build_skeleton(config),
        Plan.from_tables({"data_parallel": {"zero": 3}}),
        optimizer=OptimizerPolicy(learning_rate=1e-3),
        weights=weights,
        device=CPU,
    )
    tokens = torch.randint(0, 256, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    records = [engine.step(batch) for _ in range(2)]
    if not all(math.isfinite(record.loss) and math.isfinite(record.grad_norm) for record in records):
        raise ArithmeticError(f"loss {[record.loss for record in records]}, norm {records[-1].grad_norm}")
    if records[0].grad_norm == 0.0:
        raise ArithmeticError("no gradient")
    if not _is_causal(engine, batch["input_ids"]):
        raise ArithmeticError("trains, but a token's logits depend on later tokens")
    return {
        "blocks": len(engine.layout.blocks),
        "parameters": sum(parameter.numel() for parameter in engine.model.parameters()),
        "by_rule": len(weights.by_rule),
    }


@torch.no_grad()
def _is_causal(engine: Engine, ids: torch.Tensor) -> bool:
    """Another last token must leave the logits before it as they are."""
    engine.model.eval()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    first, second = (engine.model(input_ids=rows, use_cache=False).logits[:, :-1].float() for rows in (ids, changed))
    return torch.allclose(first, second, rtol=1e-4, atol=1e-4)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def table(outcomes: list[Outcome], *, total_s: float) -> str:
    """The dated result as Markdown, caveats first."""
    counts = Counter(outcome.kind for outcome in outcomes)
    lines = [
        f"# Which causal LM types train, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats: models of two layers and width 64 with random weights, two steps, one process, float32, rows of 16",
        "tokens. `trained` means finite losses and a gradient, not that the type learns well at full size. Types whose",
        "usual input is more than text are given text alone.",
        "",
        f"- Versions: torch {torch.__version__}, transformers {transformers.__version__},"
        f" Python {platform.python_version()}; one core of {platform.machine()}; {total_s:.0f} s in all.",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/families_train.py --out FILE`",
        f"- {counts['trained']} trained, {counts['refused']} refused with a sentence, {counts['failed']} failed,"
        f" of {len(outcomes)} types.",
        "- `by rule`: parameters that the model's own code leaves without an initial value.",
        "",
        "| type | outcome | blocks | parameters | by rule | reason |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.kind, outcome.model_type)):
        reason = outcome.reason.replace("|", "\\|")[:160]
        figures = f"{outcome.blocks} | {outcome.parameters:,} | {outcome.by_rule}"
        figures = figures if outcome.kind == "trained" else " | | "
        lines.append(f"| {outcome.model_type} | {outcome.kind} | {figures} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    began_s = time.perf_counter()
    outcomes = []
    for model_type in options.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        outcome = try_type(model_type)
        outcomes.append(outcome)
        print(
            f"{model_type:26} {outcome.kind:8} {outcome.seconds:5.1f}s blocks {outcome.blocks} "
            f"by rule {outcome.by_rule} {outcome.reason[:200]}",
            flush=True,
        )
    print(dict(Counter(outcome.kind for outcome in outcomes)))
    if options.out:
        options.out.write_text(table(outcomes, total_s=time.perf_counter() - began_s), encoding="utf-8")


if __name__ == "__main__":
    main()
