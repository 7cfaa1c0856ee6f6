"""Calibrated codes: less error in products than rounding to nearest, in the same stored format, block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from weft.core.errors import WeightsError
from weft.models.gptq import calibrated_codes
from weft.models.hf_export import export_folder, skeleton_of
from weft.models.quantised import Quantiser
from weft.models.weight_codes import FORMATS, dequantised, quantise
from weft.train.calibration import BlockCalibration, Rows

_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def correlated(rows: int, columns: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    return torch.randn(rows, columns, generator=generator) @ (mix + 0.3) * torch.rand(columns, generator=generator)


@pytest.mark.parametrize("kind", FORMATS)
def test_products_err_less_than_rounded_to_nearest(kind: str) -> None:
    inputs, others = correlated(700, 128, seed=0).split([600, 100])
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(1))
    codes, scales = calibrated_codes(weight, inputs.T @ inputs, FORMATS[kind], scale_dtype=torch.bfloat16)
    plain = quantise(weight, FORMATS[kind], scale_dtype=torch.bfloat16)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (
        plain[0].dtype,
        plain[0].shape,
        plain[1].dtype,
        plain[1].shape,
    )
    better, worse = ((linear(others, dequantised(*one) - weight)).square().sum() for one in ((codes, scales), plain))
    assert better < 0.7 * worse


def test_no_row_errs_more_than_rounded_to_nearest() -> None:
    inputs = correlated(40, 64, seed=3)  # G has not full rank
    inputs[:, 5] = 0
    weight = torch.randn(200, 64, generator=torch.Generator().manual_seed(4))
    gram = inputs.T @ inputs
    form = FORMATS["int8"]
    made = calibrated_codes(weight, gram, form, scale_dtype=torch.float32)
    plain = quantise(weight, form, scale_dtype=torch.float32)
    errors = [((dequantised(*one) - weight) @ inputs.T).square().sum(1) for one in (made, plain)]
    assert (errors[0] <= errors[1] * (1 + 1e-4)).all()


def exported(kind: str, family: str, out: Path, rows: list[Rows], **fields: Any) -> tuple[Any, Any, BlockCalibration]:
    """The model, the calibrated folder loaded again, and what the calibration recorded."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**_TINY | fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(5)  # products of the size of the residual stream
    quantiser = Quantiser(skeleton_of(config), FORMATS[kind])
    calibration = BlockCalibration(config, rows, quantiser, dtype=torch.float32, device=torch.device("cpu"))
    own = dict(model.named_parameters())
    names = calibration.order(list(own))
    tensors = calibration.tensors((name, own[name].detach()) for name in names)
    export_folder(config, tensors, out, quantiser=quantiser)
    again = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    again(input_ids=torch.zeros(1, 1, dtype=torch.long))  # the first forward unpacks the weights
    return model, again, calibration


def token_rows(count: int) -> list[Rows]:
    generator = torch.Generator().manual_seed(7)
    return [{"input_ids": torch.randint(1, 96, (1, 64), generator=generator)} for _ in range(count)]


def seen_by(module: nn.Module, model: nn.Module, rows: list[Rows]) -> list[Tensor]:
    """The first argument of every call of the module, tokens as rows."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().flatten(0, 1)))
    with torch.no_grad():
        for row in rows:
            model(**row)
    hook.remove()
    return seen


def test_a_block_is_calibrated_on_the_outputs_of_rounded_blocks(tmp_path: Path) -> None:
    """Against grams that hooks on whole models collect: block 0 of the model, block 1 of its rounded copy."""
    rows = token_rows(6)
    model, again, calibration = exported("int4", "llama", tmp_path / "out", rows)
    assert calibration.record.as_dict() == {"rows": 6, "tokens": 384, "matrices": 14, "rounded": {}}
    form = calibration._quantiser.format
    # what block 1 sees: block 0 rounded, block 1 as trained
    half = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    half.load_state_dict(model.state_dict())
    half.model.layers[0].load_state_dict(again.model.layers[0].state_dict(), strict=False)  # scales are unexpected
    for number, source in ((0, model), (1, half)):
        layer = source.model.layers[number].mlp.down_proj
        inputs = torch.cat(seen_by(layer, source, rows))
        codes, scales = calibrated_codes(
            layer.weight.detach(), inputs.T @ inputs / len(inputs), form, scale_dtype=torch.float32
        )
        stored = again.model.layers[number].mlp.down_proj.weight
        same = (dequantised(codes, scales) - stored).abs() < 1e-6
        assert same.float().mean() > 0.99  # sums in another order may move a tie


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_calibrated_on_their_own_tokens(family: str, tmp_path: Path) -> None:
    rows, fields = token_rows(8), {"qwen3_moe": _EXPERTS, "mixtral": {"num_local_experts": 4}}[family]
    model, again, calibration = exported("int4", family, tmp_path / "calibrated", rows, **fields)
    record = calibration.record
    experts = [name for name in dict(model.named_parameters()) if ".experts." in name]
    assert record.matrices + sum(record.rounded.values()) == 2 * 4 + 4 * len(experts)
    assert sum(record.rounded.values()) < 4
    quantiser = Quantiser(skeleton_of(model.config), FORMATS["int4"])
    export_folder(model.config, model.named_parameters(), tmp_path / "rounded", quantiser=quantiser)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded", attn_implementation="eager")
    others = torch.cat([row["input_ids"] for row in token_rows(12)[8:]])
    outputs = [seen_by(one.model.layers[1], one, [{"input_ids": others}])[0] for one in (model, again, rounded)]
    errors = {name: (one - outputs[0]).norm() for name, one in zip(("calibrated", "rounded"), outputs[1:], strict=True)}
    assert errors["calibrated"] < 0.95 * errors["rounded"]


def test_an_expert_with_too_few_tokens_is_rounded_and_named(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.randint(1, 96, (1, 8), generator=torch.Generator().manual_seed(7))}]
    _, _, calibration = exported("int8", "qwen3_moe", tmp_path / "out", rows, **_EXPERTS)
    assert any(".experts." in name for name in calibration.record.rounded)


def test_a_family_whose_blocks_share_values_is_refused() -> None:
    config = CONFIG_MAPPING["gemma3n_text"](
        **_TINY | {"num_kv_shared_layers": 1, "vocab_size_per_layer_input": 96, "layer_types": None}
    )
    skeleton = skeleton_of(config)
    with pytest.raises(WeightsError, match="block by block") as raised:
        BlockCalibration(
            config, [], Quantiser(skeleton, FORMATS["int8"]), dtype=torch.float32, device=torch.device("cpu")
        )
    assert "--calibrate" in raised.value.hint


def test_a_model_that_overflows_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**_TINY)).eval()
    quantiser = Quantiser(skeleton_of(model.config), FORMATS["int4"])
    calibration = BlockCalibration(
        model.config, token_rows(1), quantiser, dtype=torch.float32, device=torch.device("cpu")
    )
    own = {name: one.detach() * (torch.inf if "up_proj" in name else 1.0) for name, one in model.named_parameters()}
    with pytest.raises(WeightsError, match=r"inputs of .*down_proj\.weight overflow"):
        list(calibration.tensors((name, own[name]) for name in calibration.order(list(own))))
