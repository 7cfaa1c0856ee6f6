"""A float32 residual stream beside compute in bfloat16: in every kind of family, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import by_default
from tiny import build_engine, global_batch, train_steps

from weft.core.errors import NotBuiltError
from weft.core.run_spec import ModelSpec

WIDE = {"preset": "bf16", "residual": "float32"}
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": "llama",
    "qwen3": "qwen3-tied",
    "gpt2": "gpt2",
    "mixtral": "mixtral",
    "gemma2": ModelSpec(type="gemma2", config=SMALL),  # norms after attention and MLP too
    "gemma3": ModelSpec(type="gemma3_text", config=SMALL),
    "gpt_oss": ModelSpec(type="gpt_oss", config={**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ModelSpec(type="cohere", config=SMALL),  # attention and MLP side by side
}


@pytest.mark.parametrize("family", by_default(["llama", "gpt2", "gemma2", "gpt_oss"], FAMILIES))
def test_the_stream_is_float32_and_the_rest_is_not(family: str) -> None:
    engine = build_engine(FAMILIES[family], {"precision": WIDE, "pipeline": {"microbatches": 2}})
    streams: set[torch.dtype] = set()

    def see(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
        streams.add((args[0] if args else kwargs["hidden_states"]).dtype)
        streams.add((output[0] if isinstance(output, tuple) else output).dtype)

    for name in engine.layout.blocks:
        engine.model.get_submodule(name).register_forward_hook(see, with_kwargs=True)
    train_steps(engine, 1)
    assert streams == {torch.float32}
    found = {row.component: row for row in engine.dtypes()}
    assert all(row.ok for row in found.values()), found
    assert found["residual"].found == ("float32",)
    assert found["activations"].found == found["logits"].found == ("bfloat16",)


def test_layouts_and_recompute_have_the_same_bits() -> None:
    plans: list[dict[str, Any]] = [{}, {"data_parallel": {"zero": 3}}, {"activations": {"policy": "full"}}]
    plans += [{"activations": {"policy": "selective"}}]
    curves = [train_steps(build_engine("llama", {"precision": WIDE, **plan}), 3) for plan in plans]
    assert all(curve == curves[0] for curve in curves)


def test_small_terms_are_not_lost() -> None:
    """Many blocks that each add little to a large stream: in bfloat16 most of what they add is rounded away."""
    deep = ModelSpec(type="llama", config={**SMALL, "num_hidden_layers": 12})

    def hidden(precision: dict[str, str]) -> torch.Tensor:
        engine = build_engine(deep, {"precision": precision})
        kept: list[torch.Tensor] = []
        last = engine.model.get_submodule(engine.layout.blocks[-1])
        first = engine.model.get_submodule(engine.layout.blocks[0])
        first.register_forward_pre_hook(lambda _module, args: kept.append(args[0].detach().double()))
        last.register_forward_hook(lambda _module, _args, output: kept.append(output.detach().double()))
        engine.evaluate(global_batch(0))
        return kept[-1] - kept[0]

    exact, wide, narrow = (hidden(one) for one in ({"preset": "fp32"}, WIDE, {"preset": "bf16"}))
    errors = [float((one - exact).norm() / exact.norm()) for one in (wide, narrow)]
    assert errors[0] < 0.7 * errors[1], errors


@pytest.mark.parametrize(
    ("family", "match"),
    [
        (ModelSpec(type="olmo2", config=SMALL), r"multiplies its stream before any norm \(model\.layers\.0\)"),
        (
            ModelSpec(type="bloom", config={"hidden_size": 32, "n_layer": 2, "n_head": 4}),
            r"gets its stream in another dtype than float32 \(transformer\.h\.0\)",
        ),
    ],
)
def test_a_family_that_does_more_with_its_stream_is_refused(family: ModelSpec, match: str) -> None:
    engine = build_engine(family, {"precision": WIDE})
    with pytest.raises(NotBuiltError, match=match):
        train_steps(engine, 1)
