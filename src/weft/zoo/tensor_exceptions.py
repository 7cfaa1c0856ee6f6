"""What tensor parallelism must know of a family and cannot read off its modules. Data only; keys are model types.

Not the rules themselves (models/tensor_finder). A family is here for a reason read in its modelling code: how a fused
projection is ordered, why a part stays whole. What is said here about a part that is cut, a test has compared with the
uncut model: two ranks against one, outputs and gradients.
"""

from __future__ import annotations

# how a fused query-key-value projection orders its outputs, as (flag on the attention module, order): first flag set
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

# a query projection twice as wide makes, head by head, a query and a gate of the output
GATED_QUERY = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})

# fused gate and up without a `chunk` in the code: viewed as [2, width], which is the same order
HALVES = frozenset({"moshi"})

# families whose cut model was compared with the uncut one, two ranks against one: logits and every gradient, tiny sizes
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

# models that stay whole altogether
UNCUT: dict[str, str] = {
    "blt": "its blocks work on patches of bytes, of three widths",
    "prophetnet": "it predicts several tokens at once, in streams of their own",
    "reformer": "its layers are reversible and hash their tokens",
}

# attention that stays whole, and attention that does so only where a field of the config is set
UNCUT_ATTENTION: dict[str, str] = {
    "big_bird": "it is put together anew as the model runs",
    "bloom": "its ALiBi covers all heads",
    "codegen": "its fused projection is dealt out in four blocks of its own",
    "mpt": "its ALiBi covers all heads",
    "trocr": "it shapes its output by the width of its input",
}
_SHARED_KEYS = "some layers use the keys and values of others"
UNCUT_ATTENTION_WHERE: tuple[tuple[str, str, str], ...] = (
    ("falcon", "alibi", "its ALiBi covers all heads"),
    ("gemma3n_text", "num_kv_shared_layers", _SHARED_KEYS),
    ("gemma4_text", "num_kv_shared_layers", _SHARED_KEYS),
    ("gemma4_unified_text", "num_kv_shared_layers", _SHARED_KEYS),
)

UNCUT_EXPERTS: dict[str, str] = {"longcat_flash": "some of its experts hand on their input, once a rank"}

# attention with an indexer that picks tokens without a gradient: every rank computes all of it, alike
INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa", "hy_v4"})

# why hidden states do not pass one straight chain of blocks as [batch, sequence, hidden], where the blocks do not show
_STREAMS = "its blocks pass on several streams of hidden states"
NOT_STRAIGHT: dict[str, str] = {
    "deepseek_v4": _STREAMS,
    "gemma3n_text": _STREAMS,
    "hrm_text": "its blocks are passed several times",
    "hy_v4": _STREAMS,
    "prophetnet": _STREAMS,
    "qwen4_exp_text": _STREAMS,
    "reformer": _STREAMS,
}
