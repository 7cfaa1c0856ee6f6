"""Model families that isolate the documents of a packed row: a measured list, since no model attribute shows it.

A model only gets position_ids that restart. A family is listed if the logits of a packed document equal those of the
document alone, with both attention implementations (tests/unit/train/test_isolation.py measures it again). Some
families ignore position_ids (bert, opt, afmoe); convolutions, scans and linear attention leak past any mask.
"""

from __future__ import annotations

from torch import nn

from weft.core.data_spec import DataSpec
from weft.core.errors import NotBuiltError

_NAMES = """
apertus arcee aria_text bitnet cohere cohere2 cohere2_moe cwm diffllama doge ernie4_5 ernie4_5_moe exaone4 exaone_moe
flex_olmo gemma gemma3_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared
helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 jais2 jetmoe lfm2 llama minimax_m2 ministral ministral3 mistral mixtral
modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
seed_oss smollm3 solar_open starcoder2
"""
ISOLATING_FAMILIES: frozenset[str] = frozenset(_NAMES.split())
# Masks of these depend only on distances within a row; chunk borders, for example, do not move with a document.
_ISOLATING_LAYERS = frozenset({"full_attention", "sliding_attention"})


def require_isolation(data: DataSpec, model: nn.Module) -> None:
    """Refuse rows of several documents for models whose documents would silently attend to each other."""
    if not data.isolates:
        return
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", type(model).__name__)
    layers = set(getattr(config, "layer_types", None) or ())
    if family not in ISOLATING_FAMILIES or not layers <= _ISOLATING_LAYERS:
        raise NotBuiltError(
            f"{family!r} models are not known to isolate packed documents",
            hint="set data.packing = 'none', or 'concatenate' without data.isolate_documents; "
            "or use a family such as llama, qwen3, gpt2, mixtral",
        )
