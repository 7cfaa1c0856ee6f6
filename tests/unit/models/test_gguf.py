"""GGUF files give the logits of the model when transformers reads them, and the tensors that gguf's reader finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from weft.core.errors import WeightsError
from weft.data.byte_tokenizer import ByteTokenizer
from weft.models.gguf_export import FILE, FORMATS, export_gguf, load_gguf
from weft.models.gguf_tokenizer import NoGgufTokenizerError, gguf_tokenizer
from weft.models.hf_export import skeleton_of

_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),  # the only one that transformers reads
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True, "head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 8}),
}
IDS = torch.arange(3, 43).reshape(2, 20)
# relative error of logits of two layers of random weights: bits of the format
BOUNDS = {"gguf-f16": 0.002, "gguf-bf16": 0.015, "gguf-q8_0": 0.04, "gguf-q4_0": 0.5}


def built(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**_TINY | fields), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that are not all one and zero
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def written(model: Any, out: Path, kind: str, tokenizer: Path | None = None) -> dict[str, Any]:
    skeleton = skeleton_of(model.config)
    return export_gguf(model.config, model.state_dict().items(), out, kind=kind, skeleton=skeleton, tokenizer=tokenizer)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_logits(family: str, tmp_path: Path) -> None:
    name, fields = FAMILIES[family]
    model = built(name, **fields)
    plain = logits(model)
    for kind in ("gguf-f16", "gguf-q8_0"):
        written(model, tmp_path / kind, kind)
        error = (logits(load_gguf(tmp_path / kind)) - plain).norm() / plain.norm()
        assert error < BOUNDS[kind], kind


@pytest.mark.parametrize("kind", FORMATS)
def test_the_logits_are_those_of_the_dequantised_weights(kind: str, tmp_path: Path) -> None:
    model = built("llama", head_dim=32)
    plain = logits(model)
    record = written(model, tmp_path / "out", kind)
    again = load_gguf(tmp_path / "out")
    assert 0 < (logits(again) - plain).norm() / plain.norm() < BOUNDS[kind]
    by_name = {one.name: one for one in gguf.GGUFReader(tmp_path / "out" / FILE).tensors}
    own = model.state_dict()
    for part, name in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj"), ("attn_norm", "input_layernorm")):
        read = by_name[f"blk.1.{part}.weight"]
        values = torch.from_numpy(gguf.quants.dequantize(read.data, read.tensor_type).copy())
        weight = own[f"model.layers.1.{name}.weight"]
        # half a step of the largest weight of a block of 32
        steps = {"gguf-f16": 2**-11, "gguf-bf16": 2**-8, "gguf-q8_0": 0.55 / 127, "gguf-q4_0": 1.01 / 8}
        assert (values - weight).abs().max() <= weight.abs().max() * (0 if "norm" in part else steps[kind])
        assert torch.equal(again.state_dict()[f"model.layers.1.{name}.weight"], values)
    eight_bits = sum(one.tensor_type == gguf.GGMLQuantizationType.Q8_0 for one in by_name.values())
    assert eight_bits == {"gguf-q8_0": 16, "gguf-q4_0": 2}.get(kind, 0)
    matrices = sum(value.numel() for value in own.values() if value.ndim == 2)
    assert record["quantised_parameters"] == (matrices if "q" in kind else 0)


def test_experts_are_stacked_in_their_order(tmp_path: Path) -> None:
    """Mixtral: transformers reads its files as a llama without experts, so gguf's reader judges."""
    model = built("mixtral", num_local_experts=4, sliding_window=None)
    written(model, tmp_path / "out", "gguf-f16")
    reader = gguf.GGUFReader(tmp_path / "out" / FILE)
    read = {one.name: torch.from_numpy(one.data.astype("float32")) for one in reader.tensors}
    own = model.state_dict()
    gate, up = own["model.layers.1.mlp.experts.gate_up_proj"].chunk(2, dim=1)
    for name, wanted in (("gate", gate), ("up", up), ("down", own["model.layers.1.mlp.experts.down_proj"])):
        torch.testing.assert_close(read[f"blk.1.ffn_{name}_exps.weight"], wanted, rtol=1e-3, atol=1e-4)
    assert read["blk.1.ffn_gate_inp.weight"].shape == (4, 64)
    with pytest.raises(WeightsError, match="does not read"):
        load_gguf(tmp_path / "out")


def test_the_byte_tokenizer_reads_back(tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    ByteTokenizer().save(tmp_path / "bytes")
    assert written(built("llama"), tmp_path / "out", "gguf-q8_0", tmp_path / "bytes")["notes"] == []
    same_tokens(tmp_path / "bytes", tmp_path / "out")


def test_a_byte_level_bpe_reads_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["def add(a, b):\n    return a + b\n"] * 9, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(tmp_path / "bpe")
    assert written(built("qwen2"), tmp_path / "out", "gguf-q8_0", tmp_path / "bpe")["notes"] == []
    same_tokens(tmp_path / "bpe", tmp_path / "out")
    fields = gguf.GGUFReader(tmp_path / "out" / FILE).fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"


def same_tokens(given: Path, out: Path) -> None:
    first, second = AutoTokenizer.from_pretrained(given), AutoTokenizer.from_pretrained(out, gguf_file=FILE)
    for text in ("def add(a, b):\n\treturn a + b  # é€𝄞", "<|endoftext|>x", "12 345"):
        ids = first(text)["input_ids"]
        assert second(text)["input_ids"] == ids
        assert second.decode(ids) == text
    assert second.eos_token_id == first.eos_token_id


def test_a_tokenizer_without_a_form_is_left_out_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    ByteTokenizer().save(tmp_path / "bytes")
    fields = json.loads((tmp_path / "bytes" / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated"}
    rule = {"type": "Sequence", "pretokenizers": [split, fields["pre_tokenizer"]]}
    merged = fields | {"pre_tokenizer": rule, "model": fields["model"] | {"merges": [["a", "b"]]}}
    with pytest.raises(NoGgufTokenizerError, match="no name in GGUF"):
        gguf_tokenizer(merged, {}, vocab_size=320)
    with pytest.raises(NoGgufTokenizerError, match="not a byte-level BPE"):
        gguf_tokenizer(fields | {"model": {"type": "Unigram"}}, {}, vocab_size=320)
    (tmp_path / "bytes" / "tokenizer.json").write_text(json.dumps(merged))
    notes = written(built("llama"), tmp_path / "out", "gguf-f16", tmp_path / "bytes")["notes"]
    assert "the file has no tokenizer" in notes[0]


@pytest.mark.parametrize(
    ("kind", "fields", "word"),
    [
        ("gpt_neox", {}, "gpt_neox"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
        ("qwen3_moe", _EXPERTS | {"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_what_gguf_cannot_say_is_refused(kind: str, fields: dict[str, Any], word: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[kind](**_TINY | fields)
    with pytest.raises(WeightsError, match=word) as raised:
        export_gguf(config, [], tmp_path / "out", kind="gguf-q8_0", skeleton=skeleton_of(config))
    assert raised.value.hint
    assert not (tmp_path / "out").exists()
