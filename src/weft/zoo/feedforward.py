"""Dense MLPs and mixtures of experts as declarations.

Not routing. A gated MLP has gate and up (width x hidden each) and down (hidden x width); a plain one has up and down.
Experts are one `LinearShape` with `copies`: a token meets `active` of them. Tensor parallel: up by column, down by row.
"""

from __future__ import annotations

from typing import Literal

from weft.core.model_shape import ExtraShape, LinearShape, MoeShape, NormShape, Style
from weft.zoo.config import Config, Flag, Size
from weft.zoo.declared import Declared
from weft.zoo.parts import Norm, Parts

Role = Literal["mlp", "shared_expert"]


class Mlp(Declared):
    """activation(gate) * up -> down, or activation(up) -> down where there is no gate."""

    prefix: str = "mlp."
    gate: str = "gate_proj"  # "" for a plain MLP
    up: str = "up_proj"
    down: str = "down_proj"
    fused: str = ""  # one matrix for gate and up, in place of the two
    bias: Flag = "mlp_bias"
    down_bias: Flag | None = None
    hidden: Size = "hidden_size"
    width: Size = "intermediate_size"
    activation: str = "hidden_act"
    fixed_activation: str = ""  # where the code, not the config, chooses
    role: Role = "mlp"
    extras: tuple[tuple[str, Size], ...] = ()  # learned numbers of the activation
    norm: tuple[str, Norm] | None = None  # a norm of the inner width

    def parts(self, config: Config) -> Parts:
        hidden, width, bias = config.sized(self.hidden), config.sized(self.width), config.flag(self.bias)
        names = [(self.fused, 2 * width)] if self.fused else [(name, width) for name in (self.gate, self.up) if name]
        ups = [self._linear(name, hidden, out, bias=bias, style="column") for name, out in names]
        down_bias = bias if self.down_bias is None else config.flag(self.down_bias)
        down = self._linear(self.down, width, hidden, bias=down_bias, style="row")
        is_dense = self.role == "mlp"
        return Parts(
            linears=(*ups, down),
            norms=self._norms(config, width),
            extras=tuple(
                ExtraShape(name=self.prefix + name, num_parameters=config.sized(size)) for name, size in self.extras
            ),
            mlp_width=width if is_dense else 0,
            is_gated=bool(self.fused or self.gate),
            activation=self.fixed_activation or str(config.get(self.activation, "silu")),
        )

    def _linear(self, name: str, width: int, out: int, *, bias: bool, style: Style) -> LinearShape:
        return LinearShape(
            name=self.prefix + name, in_features=width, out_features=out, bias=bias, style=style, role=self.role
        )

    def _norms(self, config: Config, width: int) -> tuple[NormShape, ...]:
        if self.norm is None:
            return ()
        name, kind = self.norm
        return (kind.shape(config, self.prefix + name, width, place="other"),)


class Moe(Declared):
    """A router, experts, and (in some families) a shared MLP that every token passes."""

    prefix: str = "mlp."
    router: str = "gate"
    router_bias: Flag = False
    router_size: Size | None = None  # outputs of the router, where not the number of experts
    experts: str = "experts."
    up: str = "gate_up_proj"
    down: str = "down_proj"
    count: Size = "num_experts"
    top_k: Size = "num_experts_per_tok"
    width: Size = "moe_intermediate_size"
    hidden: Size = "hidden_size"
    expert_bias: Flag = False
    is_gated: bool = True
    activation: str = "hidden_act"
    fixed_activation: str = ""
    shared: Mlp | None = None
    has_shared: Flag = True
    shared_gate: str = ""
    extras: tuple[tuple[str, Size], ...] = ()  # such as a learned correction of the router
    is_listed: bool = False  # the experts' matrices are declared beside this, in a layout of their own

    def parts(self, config: Config) -> Parts:
        shared = self.shared.parts(config) if self.shared is not None and config.flag(self.has_shared) else Parts()
        count, width = config.sized(self.count), config.sized(self.width)
        shared_width = next((linear.in_features for linear in shared.linears if linear.style == "row"), 0)
        return Parts(
            linears=(
                *self._router(config),
                *self._experts(config),
                *shared.linears,
                *self._shared_gate(config, shared),
            ),
            norms=shared.norms,
            extras=tuple(
                ExtraShape(name=self.prefix + name, num_parameters=config.sized(size)) for name, size in self.extras
            ),
            moe=MoeShape(
                num_experts=count,
                top_k=self._top_k(config),
                expert_width=width,
                shared_width=shared_width,
            ),
            is_gated=self.is_gated,
            activation=self.fixed_activation or str(config.get(self.activation, "silu")),
        )

    def _top_k(self, config: Config) -> int:
        # a config may leave it out; the parameter count does not need it, so one expert is assumed
        wanted = config.get(self.top_k, 1) if isinstance(self.top_k, str) else config.sized(self.top_k)
        return min(int(wanted), config.sized(self.count))

    def _shared_gate(self, config: Config, shared: Parts) -> list[LinearShape]:
        if not self.shared_gate or not shared.linears:
            return []
        name, hidden = self.prefix + self.shared_gate, config.sized(self.hidden)
        return [LinearShape(name=name, in_features=hidden, out_features=1, role="shared_expert")]

    def _router(self, config: Config) -> list[LinearShape]:
        if not self.router:
            return []
        out = config.sized(self.count if self.router_size is None else self.router_size)
        return [
            LinearShape(
                name=self.prefix + self.router,
                in_features=config.hidden,
                out_features=out,
                bias=config.flag(self.router_bias),
                role="router",
            )
        ]

    def _experts(self, config: Config) -> list[LinearShape]:
        if self.is_listed:
            return []
        hidden, width, count = config.sized(self.hidden), config.sized(self.width), config.sized(self.count)
        up_width = 2 * width if self.is_gated else width
        matrices: list[tuple[str, int, int, Style]] = [
            (self.up, hidden, up_width, "column"), (self.down, width, hidden, "row"),
        ]  # fmt: skip
        return [
            LinearShape(
                name=self.prefix + self.experts + name,
                in_features=rows,
                out_features=out,
                bias=config.flag(self.expert_bias),
                style=style,
                role="expert",
                copies=count,
                active=self._top_k(config),
            )
            for name, rows, out, style in matrices
        ]
