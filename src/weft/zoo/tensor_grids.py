"""Families that were compared with one process on grids of tensor-parallel ranks. Data only; keys are model types.

On a grid every tensor of hidden width is a slice: a line of modelling code that works across features, outside of norms
and linears, would be wrong without an error. So a family is divided on a grid only once it was seen to be right: loss,
norm and every gradient of three steps in 2d on 4 ranks and in 3d on 8 equal those of one process.
"""

from __future__ import annotations

COMPARED_ON_GRIDS = frozenset({
    "apertus", "arcee", "beam", "bitnet", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "flint", "gemma", "gemma2",
    "gemma3_text", "gemma4_unified_text", "glm", "glm4", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite",
    "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2", "lfm2", "llama", "ministral", "ministral3",
    "mistral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "openai-gpt", "persimmon", "phi", "phi3", "qwen2",
    "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
})  # fmt: skip
