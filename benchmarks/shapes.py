"""Shapes of real models, by Hugging Face config, that the memory benchmarks share. Data only."""

from __future__ import annotations

LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768,
}  # fmt: skip
LLAMA_3B = {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768,
}  # fmt: skip
LLAMA_70B_20L = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 20, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 32768,
}  # fmt: skip
# A vocabulary of bytes: the loss is small, so the peak lies in the backward of a block, where kernels take workspaces.
LLAMA_BYTES = {**LLAMA_1B, "vocab_size": 512}
LLAMA_BYTES_WIDE = {**LLAMA_1B, "vocab_size": 512, "num_key_value_heads": 32, "intermediate_size": 2048}
QWEN3_2B = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_8L = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
GPT2_XL = {
    "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 2048, "vocab_size": 50257,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
MIXTRAL = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    "sliding_window": None,
}  # fmt: skip
GEMMA2 = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
}  # fmt: skip
OLMO2_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 100352, "max_position_embeddings": 8192,
}  # fmt: skip
OLMO2_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 100352, "max_position_embeddings": 8192,
}  # fmt: skip
NEOX = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16,
    "vocab_size": 50432, "max_position_embeddings": 8192,
}  # fmt: skip
PHI3 = {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32064, "pad_token_id": 0, "sliding_window": None,
    "max_position_embeddings": 16384, "original_max_position_embeddings": 16384,
}  # fmt: skip
MISTRAL_4L = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32768, "sliding_window": None, "max_position_embeddings": 32768,
}  # fmt: skip
MISTRAL_7B = {**MISTRAL_4L, "num_hidden_layers": 32}
QWEN2_1B = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
STARCODER2 = {
    "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30, "num_attention_heads": 24,
    "num_key_value_heads": 2, "vocab_size": 49152, "residual_dropout": 0.0, "embedding_dropout": 0.0,
    "attention_dropout": 0.0, "sliding_window": None, "max_position_embeddings": 16384,
}  # fmt: skip
COHERE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 256000,
}  # fmt: skip
OLMOE = {
    "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304,
}  # fmt: skip
STABLELM = {
    "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 50304, "attention_dropout": 0.0, "max_position_embeddings": 8192,
}  # fmt: skip
GRANITE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 49152, "max_position_embeddings": 16384,
}  # fmt: skip
