"""Low-bit folders load in transformers with no missing key, as exactly the weights that the codes and scales say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from weft.core.errors import WeightsError
from weft.models.hf_export import export_folder, skeleton_of
from weft.models.quantised import Quantiser
from weft.models.weight_codes import FORMATS, WeightFormat, pack, quantise

_LLAMA = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_DEEPSEEK = {"moe_intermediate_size": 64, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
             "first_k_dense_replace": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": 8}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "qwen3-tied": ("qwen3", _LLAMA | {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", _LLAMA),
    "gemma3_text": ("gemma3_text", _LLAMA),
    "phi3": ("phi3", _LLAMA),
    "opt": ("opt", _LLAMA | {"word_embed_proj_dim": 64, "ffn_dim": 128}),
    "gpt_neox": ("gpt_neox", _LLAMA),
    "qwen2_moe": ("qwen2_moe", _LLAMA | _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", _LLAMA | _EXPERTS),
    "mixtral": ("mixtral", _LLAMA | {"num_local_experts": 4}),
    "deepseek_v3": ("deepseek_v3", _LLAMA | _LATENT | _DEEPSEEK),
}


def built(family: str) -> Any:
    torch.manual_seed(0)
    kind, fields = FAMILIES[family]
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields), attn_implementation="eager").eval()


def by_hand(weight: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """The weights as codes times scales, matrix by matrix."""
    if weight.ndim == 3:
        return torch.stack([by_hand(one, form) for one in weight])
    codes, scales = quantise(weight, form, scale_dtype=torch.float32)
    return (codes.float().unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_loads_as_the_weights_its_codes_say(family: str, kind: str, tmp_path: Path) -> None:
    model = built(family)
    quantiser = Quantiser(skeleton_of(model.config), FORMATS[kind])
    own = dict(model.state_dict())
    export_folder(model.config, own.items(), tmp_path / "out", quantiser=quantiser)
    again, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(told.values()), told
    with torch.no_grad():
        plain = model(input_ids=torch.arange(3, 27).reshape(2, 12)).logits
        low = again(input_ids=torch.arange(3, 27).reshape(2, 12)).logits  # the first forward unpacks the weights
    loaded = again.state_dict()
    assert len(quantiser.model_names) >= 8
    for name, value in own.items():
        if name in quantiser.model_names:
            wanted = by_hand(value, quantiser.format)
            assert not torch.equal(wanted, value), name
            torch.testing.assert_close(loaded[name].float(), wanted, rtol=1e-6, atol=0, msg=name)
        else:
            assert torch.equal(loaded[name], value), name
    if "num_experts" in str(model.config) or "experts" in str(own.keys()):
        assert any("experts" in name for name in quantiser.model_names)
    error = ((low - plain).norm() / plain.norm()).item()
    assert error < {"int8": 0.05, "int4": 0.4, "float8": 0.1}[kind]


def test_the_bytes_are_those_of_the_codes(tmp_path: Path) -> None:
    model = built("llama")
    sizes = {}
    for kind in FORMATS:
        quantiser = Quantiser(skeleton_of(model.config), FORMATS[kind])
        export_folder(
            model.config, model.state_dict().items(), tmp_path / kind, quantiser=quantiser, dtype=torch.bfloat16
        )
        tensors = load_file(tmp_path / kind / "model.safetensors")
        sizes[kind] = sum(one.nbytes for name, one in tensors.items() if "layers" in name and "norm" not in name)
        assert quantiser.num_quantised == sum(
            module.weight.numel() for name, module in model.named_modules() if name.endswith("proj")
        )
        assert "lm_head" in quantiser.kept
    number = quantiser.num_quantised
    assert sizes["int8"] == pytest.approx(number, rel=0.06)
    assert sizes["float8"] == pytest.approx(number, rel=0.06)
    assert sizes["int4"] == pytest.approx(number * (0.5 + 2 / 64), rel=0.03)


def test_what_does_not_divide_keeps_its_dtype_and_is_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llama"](**_LLAMA | {"intermediate_size": 50})
    model = AutoModelForCausalLM.from_config(config)
    quantiser = Quantiser(skeleton_of(config), FORMATS["int4"])
    assert "model.layers.0.mlp.down_proj.weight" not in quantiser.model_names
    assert "do not divide" in quantiser.kept["model.layers.1.mlp.down_proj"]
    export_folder(config, model.state_dict().items(), tmp_path / "out", quantiser=quantiser)
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    weight = again.get_parameter("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(weight, model.get_parameter("model.layers.0.mlp.down_proj.weight"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.down_proj" in written["ignore"]


def test_a_model_without_linear_layers_is_refused() -> None:
    config = CONFIG_MAPPING["gpt2"](n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=96)
    with pytest.raises(WeightsError, match="no linear layer") as raised:
        Quantiser(skeleton_of(config), FORMATS["int8"])
    assert raised.value.hint


def test_experts_that_are_stored_stacked_keep_their_dtype_and_are_reported() -> None:
    config = CONFIG_MAPPING["gpt_oss"](**_LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2})
    quantiser = Quantiser(skeleton_of(config), FORMATS["int8"])
    assert any("experts.gate_up_proj" in name for name in quantiser.kept)
    assert not any("router" in name for name in quantiser.model_names)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    kind=st.sampled_from(sorted(FORMATS)),
    spread=st.sampled_from([1e-4, 1.0, 300.0]),
    seed=st.integers(0, 10**6),
)
def test_each_weight_errs_by_half_a_step_of_its_group(
    rows: int, groups: int, kind: str, spread: float, seed: int
) -> None:
    weight = torch.randn(rows, 128 * groups, generator=torch.Generator().manual_seed(seed)) * spread
    weight[0, :128] = 0
    form = FORMATS[kind]
    error = (by_hand(weight, form) - weight).abs()
    width = form.group_size or weight.shape[1]
    largest = weight.unflatten(1, (-1, width)).abs().amax(-1, keepdim=True)
    if form.is_float:
        bound = torch.maximum(weight.abs().unflatten(1, (-1, width)) * 2**-4, largest * 2**-10 / form.largest * 2**4)
    else:
        # a clip below 1 may cost the largest weights up to what it clips
        bound = largest / form.largest * (0.5 if len(form.clips) == 1 else 0.5 + 8 * (1 - min(form.clips)))
    assert (error.unflatten(1, (-1, width)) <= bound * 1.001 + 1e-30).all()
    assert torch.equal(by_hand(weight, form)[0, :128], torch.zeros(128))


def test_the_clip_search_errs_less_than_no_clip() -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    plain = WeightFormat(4, group_size=128)
    searched = (by_hand(weight, FORMATS["int4"]) - weight).square().sum()
    assert searched < 0.95 * (by_hand(weight, plain) - weight).square().sum()


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_reads_back(bits: int) -> None:
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 64), dtype=torch.int8)
    from compressed_tensors.compressors import unpack_from_int32

    assert torch.equal(unpack_from_int32(pack(codes, bits), bits, codes.shape), codes)


def test_blocks_of_rows_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 256, generator=torch.Generator().manual_seed(1))
    whole = quantise(weight, FORMATS["int4"], scale_dtype=torch.bfloat16)
    monkeypatch.setattr("weft.models.weight_codes._BLOCK_NUMBERS", 256 * 5)
    parts = quantise(weight, FORMATS["int4"], scale_dtype=torch.bfloat16)
    assert all(map(torch.equal, whole, parts))
