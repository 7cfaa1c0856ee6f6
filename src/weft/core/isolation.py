"""Model families that isolate the documents of a packed row: a measured list, since no model attribute shows it.

A model only gets position_ids that restart. A family is listed if the logits of a packed document equal those of the
document alone, with both attention implementations (tests/unit/train/test_isolation.py measures it again). Some
families ignore position_ids (bert, opt, afmoe); convolutions, scans and linear attention leak past any mask.
"""

from __future__ import annotations

_NAMES = """
apertus arcee aria_text bitnet cohere cohere2 cohere2_moe cwm diffllama doge ernie4_5 ernie4_5_moe exaone4 exaone_moe
flex_olmo gemma gemma3_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared
helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 jais2 jetmoe lfm2 llama minimax_m2 ministral ministral3 mistral mixtral
modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
seed_oss smollm3 solar_open starcoder2
"""
ISOLATING_FAMILIES: frozenset[str] = frozenset(_NAMES.split())
# Masks of these depend only on distances within a row; chunk borders, for example, do not move with a document.
ISOLATING_LAYERS = frozenset({"full_attention", "sliding_attention"})


def why_not_isolated(family: str, layers: frozenset[str] = frozenset()) -> tuple[str, str] | None:
    """Why documents of a row would attend to each other, as (sentence, hint). `layers`: kinds of layers, if known."""
    if family in ISOLATING_FAMILIES and layers <= ISOLATING_LAYERS:
        return None
    return (
        f"{family!r} models are not known to isolate packed documents",
        "set data.packing = 'none', or 'concatenate' without data.isolate_documents; or use a family such as llama, "
        "qwen3, gpt2, mixtral",
    )
