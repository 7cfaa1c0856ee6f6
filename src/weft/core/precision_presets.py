"""Presets of formats as data, each with its source. Components that a preset does not name follow its weights, or are
float32 (`core/precision.py`).

Published recipes are named after the models they trained; where a report does not tell a component's format, the
preset has that of `bf16`, and `untold` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

PresetName = Literal[
    "fp32", "tf32", "fp16", "bf16", "bf16-pure", "llama-3", "qwen-3", "deepseek-v3", "mistral", "gemma", "gpt-oss"
]
PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)


@dataclass(frozen=True, kw_only=True)
class PresetData:
    """The components that a preset names, and where they are from."""

    components: dict[str, Any] = field(default_factory=dict)
    float8: dict[str, Any] = field(default_factory=dict)  # keys of [float8] that its products imply
    source: str
    untold: str = ""  # what the source does not tell, or what this version does otherwise


_BF16 = {"weights": "bfloat16", "router": "float32"}
_FLOAT32_SUMS = "gradients accumulate in float32 over micro-batches and are reduce-scattered in float32"

PRESETS: dict[PresetName, PresetData] = {
    "fp32": PresetData(source="IEEE 754 single precision throughout"),
    "tf32": PresetData(
        components={"products": "tf32"},
        source="NVIDIA A100 architecture white paper (2020): float32 in memory, operands of products in 10 + 8 bits",
        untold="a CPU has no such units: it multiplies float32",
    ),
    "fp16": PresetData(
        components={"weights": "float16"},
        source="Micikevicius et al., Mixed Precision Training, arXiv:1710.03740: float32 masters, loss scaling",
    ),
    "bf16": PresetData(
        components=_BF16,
        source="Kalamkar et al., arXiv:1905.12322; routers in float32: Switch Transformers, arXiv:2101.03961, 2.4",
    ),
    "bf16-pure": PresetData(
        components={**_BF16, "master_weights": "bfloat16", "optimizer_state": "bfloat16"},
        source="Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192: stochastic rounding of updates",
    ),
    "llama-3": PresetData(
        components=_BF16,
        source=f"The Llama 3 Herd of Models, arXiv:2407.21783, 3.3.2: {_FLOAT32_SUMS}",
        untold="moments and masters",
    ),
    "qwen-3": PresetData(
        components=_BF16,
        source="Qwen3 Technical Report, arXiv:2505.09388, and the bfloat16 weights it publishes",
        untold="everything but the weights",
    ),
    "deepseek-v3": PresetData(
        components={
            **_BF16,
            "products": "float8_e4m3",
            "dispatch": "float8_e4m3",
            "optimizer_state": "bfloat16",
        },
        float8={"recipe": "blockwise", "experts": "all"},
        source="DeepSeek-V3 Technical Report, arXiv:2412.19437, 3.3: float8 products, bfloat16 moments, "
        "float32 masters and gradients, float8 dispatch, bfloat16 combine",
        untold="which format sharded weights are gathered in: bfloat16 here",
    ),
    "mistral": PresetData(
        components=_BF16,
        source="Mistral 7B, arXiv:2310.06825, and the bfloat16 weights it publishes",
        untold="everything but the weights",
    ),
    "gemma": PresetData(
        components=_BF16,
        source="Gemma, arXiv:2403.08295, and the bfloat16 weights it publishes",
        untold="everything but the weights",
    ),
    "gpt-oss": PresetData(
        components=_BF16,
        source="gpt-oss model card, arXiv:2508.10925: experts at rest in MXFP4, everything else in bfloat16",
        untold="post-training had MXFP4 experts; here they are trained in bfloat16",
    ),
}
