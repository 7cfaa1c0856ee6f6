"""State-space and linear-attention mixers as lists of their parameters: Mamba, Mamba 2, gated delta nets, convolutions.

Not softmax attention: none of these has an `AttentionShape`. Inner width of a Mamba = expand x hidden; a depthwise
convolution over `channels` with a kernel of k has k weights a channel (and a bias).
"""

from __future__ import annotations

import math

from weft.zoo.config import Config, Flag, Size
from weft.zoo.parts import RMS, Listed, Matrix, Norm


def convolution(name: str, *, channels: Size, kernel: Size, bias: Flag = False) -> tuple[tuple[str, Size], ...]:
    return (
        (f"{name}.weight", lambda config: config.sized(channels) * config.sized(kernel)),
        (f"{name}.bias", lambda config: config.sized(channels) * config.flag(bias)),
    )


def dt_rank(key: str) -> Size:
    """The width of the time step's latent: a sixteenth of the hidden size where the config says "auto"."""
    return lambda config: math.ceil(config.hidden / 16) if config.get(key) == "auto" else config.number(key)


def mamba1(
    prefix: str,
    *,
    inner: Size,
    state: Size,
    kernel: Size,
    rank: Size,
    bias: Flag,
    conv_bias: Flag,
    has_norms: bool = False,
) -> Listed:
    norms = (("dt_layernorm", rank, RMS), ("b_layernorm", state, RMS), ("c_layernorm", state, RMS))
    return Listed(
        prefix=prefix,
        matrices=(
            Matrix("in_proj", "hidden_size", lambda config: 2 * config.sized(inner), "column", bias),
            Matrix("x_proj", inner, lambda config: config.sized(rank) + 2 * config.sized(state), "row"),
            Matrix("dt_proj", rank, inner, "column", True),
            Matrix("out_proj", inner, "hidden_size", "row", bias),
        ),
        norms=norms if has_norms else (),
        extras=(
            ("A_log", lambda config: config.sized(inner) * config.sized(state)),
            ("D", inner),
            *convolution("conv1d", channels=inner, kernel=kernel, bias=conv_bias),
        ),
    )


def mamba2(
    prefix: str, *, inner: Size, state: Size, kernel: Size, heads: Size, groups: Size, bias: Flag, conv_bias: Flag,
    out_bias: Flag | None = None, norm: Norm = RMS,
) -> Listed:  # fmt: skip
    def channels(config: Config) -> int:
        return config.sized(inner) + 2 * config.sized(groups) * config.sized(state)

    return Listed(
        prefix=prefix,
        matrices=(
            Matrix(
                "in_proj",
                "hidden_size",
                lambda config: config.sized(inner) + channels(config) + config.sized(heads),
                "column",
                bias,
            ),
            Matrix("out_proj", inner, "hidden_size", "row", bias if out_bias is None else out_bias),
        ),
        norms=(("norm", inner, norm),),
        extras=(
            ("dt_bias", heads), ("A_log", heads), ("D", heads),
            *convolution("conv1d", channels=channels, kernel=kernel, bias=conv_bias),
        ),
    )  # fmt: skip


def key_width(config: Config) -> int:
    return config.number("linear_num_key_heads") * config.number("linear_key_head_dim")


def value_width(config: Config) -> int:
    return config.number("linear_num_value_heads") * config.number("linear_value_head_dim")


def delta_net(matrices: tuple[Matrix, ...], *, output: str = "out_proj", norm: str = "norm") -> Listed:
    """The gated delta rule of Qwen3-Next and its kin; families differ in how the inputs are fused."""
    return Listed(
        prefix="linear_attn.",
        matrices=(*matrices, Matrix(output, value_width, "hidden_size", "row")),
        norms=((norm, "linear_value_head_dim", RMS),),
        extras=(
            ("dt_bias", "linear_num_value_heads"),
            ("A_log", "linear_num_value_heads"),
            *convolution(
                "conv1d",
                channels=lambda config: 2 * key_width(config) + value_width(config),
                kernel="linear_conv_kernel_dim",
            ),
        ),
    )


def linear_width(config: Config) -> int:
    return config.number("linear_num_heads") * config.number("linear_head_dim")


def kimi_delta(matrices: tuple[Matrix, ...], *, decay: Size = linear_width) -> Listed:
    """Kimi's delta attention: separate q, k, v, a forget gate, and one convolution over all three."""
    return Listed(
        prefix="self_attn.",
        matrices=(
            *(Matrix(f"{name}_proj", "hidden_size", linear_width, "column") for name in "qkv"),
            *matrices,
            Matrix("b_proj", "hidden_size", "linear_num_heads", "column"),
            Matrix("o_proj", linear_width, "hidden_size", "row"),
        ),
        norms=(("o_norm", "linear_head_dim", RMS),),
        extras=(
            ("forget_gate.A_log", "linear_num_heads"),
            ("forget_gate.dt_bias", decay),
            *convolution("conv1d", channels=lambda config: 3 * linear_width(config), kernel="linear_conv_kernel_dim"),
        ),
    )
