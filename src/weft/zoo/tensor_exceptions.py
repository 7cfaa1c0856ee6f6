"""Facts of model families that tensor parallelism cannot read from their modules. Data only; keys are model types.

The rules themselves are in models/tp. Each entry comes from the family's modelling code: the order of a fused
projection, the reason why a module stays replicated. A test compares every sharded family with the replicated model:
two ranks against one, outputs and gradients.
"""

from __future__ import annotations

# order of the outputs of a fused query-key-value projection, as (flag of the attention module, order); the first set
# flag counts
# "parts": all of q, then k, then v; "heads": q, k, v of the first head, then of the second; "groups": the queries of a
# key-value head, its key, its value, then the next
FUSED_QKV: dict[str, tuple[tuple[str, str], ...]] = {
    "bloom": (("", "heads"),),
    "falcon": (("new_decoder_architecture", "groups"), ("multi_query", "parts"), ("", "heads")),
    "gpt-sw3": (("", "parts"),),
    "gpt2": (("", "parts"),),
    "gpt_bigcode": (("multi_query", "parts"), ("", "heads")),
    "gpt_neox": (("", "heads"),),
    "gpt_neox_japanese": (("", "heads"),),
    "mpt": (("", "parts"),),
    "openai-gpt": (("", "parts"),),
    "persimmon": (("", "heads"),),
    "phi3": (("", "parts"),),
    "phi4_multimodal": (("", "parts"),),
}

# the query projection is twice as wide: per head, a query and a gate of the output
GATED_QUERY = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})

# fused gate and up without a `chunk` in the code: viewed as [2, width], which is the same order
HALVES = frozenset({"moshi"})

# families compared on two ranks with one process: logits and every gradient, tiny sizes
COMPARED = frozenset({
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bart", "beam", "bert",
    "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet", "blenderbot", "blenderbot-small", "bloom",
    "camembert", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm",
    "data2vec-text", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1",
    "electra", "emu3_text_model", "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon",
    "falcon_h1", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gemma4_unified_text", "git", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "inkling_text", "jais2", "jamba", "kimi_linear", "kolibri1",
    "laguna", "lfm2", "lfm2_moe", "llama", "llama4_text", "longcat_flash", "marian", "mbart", "megatron-bert",
    "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3",
    "mistral", "mixtral", "mllama_text_model", "modernbert-decoder", "moshi", "mpt", "mvp", "nanochat", "nemotron",
    "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "pegasus", "persimmon",
    "phi", "phi3", "phi4_multimodal", "phimoe", "plbart", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "trocr", "vaultgemma",
    "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlstm", "xmod", "youtu", "zaya",
})  # fmt: skip

# models that stay fully replicated
REPLICATED: dict[str, str] = {
    "blt": "its blocks run on byte patches of three widths",
    "prophetnet": "it predicts several tokens at once, each in its own stream of hidden states",
    "reformer": "its layers are reversible and hash their tokens",
}

# attention that stays replicated: always, or only where a field of the config is set
REPLICATED_ATTENTION: dict[str, str] = {
    "big_bird": "the model replaces it during the forward",
    "bloom": "its ALiBi covers all heads",
    "codegen": "its fused projection has four blocks of queries, values and keys",
    "mpt": "its ALiBi covers all heads",
    "trocr": "it reshapes its output to the width of its input",
}
_SHARED_KEYS = "some layers use the keys and values of others"
REPLICATED_ATTENTION_WHERE: tuple[tuple[str, str, str], ...] = (
    ("falcon", "alibi", "its ALiBi covers all heads"),
    ("gemma3n_text", "num_kv_shared_layers", _SHARED_KEYS),
    ("gemma4_text", "num_kv_shared_layers", _SHARED_KEYS),
    ("gemma4_unified_text", "num_kv_shared_layers", _SHARED_KEYS),
)

REPLICATED_EXPERTS: dict[str, str] = {
    "longcat_flash": "some of its experts return their input, which would be added once per rank"
}

# attention with an indexer that selects tokens without a gradient: every rank computes all of it
INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa", "hy_v4"})

# reasons why hidden states are not [batch, sequence, hidden] through one chain of blocks, if no module shows it
_STREAMS = "its blocks pass several streams of hidden states"
NOT_STRAIGHT: dict[str, str] = {
    "deepseek_v4": _STREAMS,
    "gemma3n_text": _STREAMS,
    "hrm_text": "its blocks run several times",
    "hy_v4": _STREAMS,
    "prophetnet": _STREAMS,
    "qwen4_exp_text": _STREAMS,
    "reformer": _STREAMS,
}
