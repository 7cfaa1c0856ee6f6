"""A frozen base in codes: their values, their bytes, and the training of an adapter beside them."""

from __future__ import annotations

import pytest
import torch
from adapters import CPU, adapted_curve, adapted_run, build_adapted
from tiny import train_steps

from weft.core.errors import NotBuiltError
from weft.core.plan import Plan
from weft.core.quantised_base import group_of, row_bytes
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.ownership import local
from weft.models.adapter.build import drawing_device, initial_weights, run_skeleton
from weft.models.adapter.lora import factor_names
from weft.models.adapter.merge import merged_tensors
from weft.models.adapter.quantised import (
    NF4_LEVELS,
    RowCodes,
    codes_by_name,
    dequantise,
    pack_rows,
    quantise_rows,
    rounded,
)
from weft.models.build import build_config
from weft.plan.legality import require_legal

KINDS = ("int8", "nf4")


@pytest.mark.parametrize("base", ["model", "bfloat16", *KINDS])
def test_a_random_base_that_is_not_saved_is_drawn_where_an_export_draws_it(base: str) -> None:
    run, gpu = adapted_run("llama", {"base": base}), torch.device("cuda", 0)
    assert drawing_device(run, gpu) == (CPU if base in KINDS else gpu)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_nearest_and_survive_storage(kind: str) -> None:
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 6).unsqueeze(1)
    weight[2, :64] = 0
    codes, scales = quantise_rows(weight, kind, 64)
    levels = torch.tensor(NF4_LEVELS) if kind == "nf4" else torch.arange(-127, 128) / 127
    groups = weight.view(6, 2, 64, 1)
    by_hand = levels[(groups / scales.float()[:, :, None, None] - levels).abs().argmin(-1)] * scales.float()[:, :, None]
    form = RowCodes(kind=kind, columns=128, group=64, is_transposed=False)
    stored = pack_rows(codes, scales, form)
    assert stored.shape == (6, row_bytes(128, bits=8 if kind == "int8" else 4, group=64))
    torch.testing.assert_close(dequantise(stored, form, torch.float32), by_hand.view(6, 128), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_values_round_to_themselves(kind: str) -> None:
    once = rounded(torch.randn(64, 192, generator=torch.Generator().manual_seed(1)), kind)
    assert torch.equal(rounded(once, kind), once)


@pytest.mark.parametrize("family", ["qwen3-tied", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_lora_on_the_dequantised_base(family: str, kind: str) -> None:
    run, plain = adapted_run(family, {"base": kind}), adapted_run(family)
    config = build_config(run.model, vocab_size=257)
    with Engine(
        run_skeleton(plain, config),
        Plan.from_tables({}),
        optimizer=OptimizerPolicy(learning_rate=1e-2),
        weights=initial_weights(run, config, device=CPU),
        device=CPU,
    ) as engine:
        expected = train_steps(engine, 3)
    found = adapted_curve(family, {}, 3, adapter={"base": kind})
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert found != adapted_curve(family, {}, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_linears_of_blocks_hold_codes_and_nothing_else_of_the_base(kind: str) -> None:
    with build_adapted("qwen3-tied", {"precision": {"preset": "bf16"}}, adapter={"base": kind}) as engine:
        in_codes = codes_by_name(engine.model)
        factors = set(factor_names(engine.model))
        assert len(in_codes) == 2 * 7
        for name, parameter in engine.model.named_parameters():
            own = local(parameter)
            if name in in_codes:
                columns = in_codes[name].columns
                assert own.nbytes == own.shape[0] * row_bytes(
                    columns, bits=in_codes[name].bits, group=group_of(columns)
                )
            assert own.dtype == (
                torch.uint8 if name in in_codes else torch.float32 if name in factors else torch.bfloat16
            )
        train_steps(engine, 1)
        assert {name for name, value in engine.model.named_parameters() if value.grad is not None} <= factors
        assert not any(name in key for key in engine.state() for name in in_codes)


def test_a_weight_merged_with_a_bfloat16_base_keeps_small_updates() -> None:
    run = adapted_run("qwen3-tied", {"base": "bfloat16"})
    config = build_config(run.model, vocab_size=257)
    source = initial_weights(run, config, device=CPU)
    names = [name for name, _ in run_skeleton(run, config).named_parameters()]
    given = {name: read(()) + (1 if ".lora_" in name else 0) for name, read in source.readers(names)}
    given = {name: value if ".lora_" in name else value.bfloat16() for name, value in given.items()}
    merged = dict(merged_tensors(run, config, source, given))
    name = "model.layers.1.mlp.down_proj"
    product = 2 * given[f"{name}.lora_B.weight"] @ given[f"{name}.lora_A.weight"]
    assert torch.equal(merged[f"{name}.weight"], given[f"{name}.weight"].float() + product)
    assert merged["model.norm.weight"].dtype == torch.bfloat16, "what has no adapter stays as it is"


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_weight_is_that_of_the_codes_and_the_adapter(kind: str) -> None:
    run = adapted_run("qwen3-tied", {"base": kind})
    config = build_config(run.model, vocab_size=257)
    source = initial_weights(run, config, device=CPU)
    base = source.base.base  # type: ignore[attr-defined]  # the model's own weights, not rounded
    names = [name for name, _ in run_skeleton(run, config).named_parameters()]
    values = {name: read(()) for name, read in source.readers(names)}
    given = {name: value + 1 if ".lora_" in name else value for name, value in values.items()}
    given = {name: value for name, value in given.items() if "proj.weight" not in name}
    merged = dict(merged_tensors(run, config, base, given))
    name = "model.layers.1.mlp.down_proj"
    product = 2 * given[f"{name}.lora_B.weight"] @ given[f"{name}.lora_A.weight"]
    torch.testing.assert_close(merged[f"{name}.weight"], values[f"{name}.weight"] + product, rtol=1e-6, atol=1e-7)


def test_layouts_that_cannot_store_the_base_are_refused() -> None:
    run = adapted_run("llama", {"base": "bfloat16"})
    with pytest.raises(NotBuiltError, match="compute in float32"):
        require_legal(Plan.from_tables({}), run)
    with pytest.raises(NotBuiltError, match="compiled blocks"):
        require_legal(Plan.from_tables({"compile": {"enabled": True}}), adapted_run("llama", {"base": "nf4"}))
