"""Tensor-parallel generation: the texts of one process, shards of weights, and caches of a rank's own heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from weft.core.errors import NotBuiltError, TensorParallelError
from weft.data.byte_tokenizer import ByteTokenizer
from weft.generate.load import load
from weft.generate.sample import Sampling, sample
from weft.generate.sharded import load_sharded, require_shardable

_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "bos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one key-value head": ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "experts": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "windows": ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
}
PROMPTS = ["warp and weft ", "x", "a shuttle crosses the loom"]
CACHES = ("bf16", "int8", "int4")


def folder_of(family: str, out: Path, **fields: Any) -> Path:
    torch.manual_seed(0)
    kind, own = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**_TINY | own | fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(6)  # clear winners among the logits, so that rounding changes no choice
    model.save_pretrained(out)
    ByteTokenizer().save(out)
    return out


def made_by(loaded: Any) -> list[tuple[list[str], int, int]]:
    made = [sample(loaded, PROMPTS, Sampling(max_new_tokens=8, kv_cache=kind)) for kind in CACHES]
    drawn = sample(loaded, PROMPTS, Sampling(max_new_tokens=8, temperature=0.5, seed=3))
    return [(one.texts, one.weight_bytes, one.cache_bytes) for one in (*made, drawn)]


def sharded_in_rank(rank: int, world_size: int, folders: list[str]) -> list[list[tuple[list[str], int, int]]]:
    cpu = torch.device("cpu")
    return [made_by(load_sharded(Path(one), degree=world_size, dtype=torch.float32, device=cpu)) for one in folders]


@pytest.mark.parametrize(
    "families",
    [["llama", "one key-value head"], pytest.param(["experts", "windows"], marks=pytest.mark.extended)],
    ids=str,
)
def test_two_ranks_generate_the_text_of_one(families: list[str], tmp_path: Path) -> None:
    folders = [folder_of(family, tmp_path / family) for family in families]
    by_rank = run_ranks(sharded_in_rank, 2, [str(one) for one in folders], timeout_s=300)
    for number, (family, folder) in enumerate(zip(families, folders, strict=True)):
        alone = made_by(load(folder, step=None, dtype=torch.float32, device=torch.device("cpu")))
        first, second = by_rank[0][number], by_rank[1][number]
        # int4 rounds at coarse steps, so that sums in another order move more
        assert [one[0] for one in first][:2] == [one[0] for one in alone][:2], family
        assert [one[0] for one in first] == [one[0] for one in second], family
        assert len(set(alone[0][0])) > 1, family
        for (_, weights, cache), (_, whole, caches) in zip(first, alone, strict=True):
            assert weights < 0.62 * whole, family
            assert cache == (caches if family == "one key-value head" else caches // 2), family


def test_degrees_that_do_not_divide_and_low_bit_weights_are_refused_before_ranks_start(tmp_path: Path) -> None:
    odd = folder_of("llama", tmp_path / "odd", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    require_shardable(odd, degree=3)
    with pytest.raises(TensorParallelError, match="do not divide over 2") as raised:
        require_shardable(odd, degree=2)
    assert "--nproc" in raised.value.hint
    low = folder_of("llama", tmp_path / "low", quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(NotBuiltError, match="quantised"):
        require_shardable(low, degree=2)
