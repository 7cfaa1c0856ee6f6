"""`Parts`: what one piece of a block (its attention, its MLP) contributes, and how norms are declared.

Not a block: `family` adds the pieces of a layer up to a `BlockShape`. Parameters of a norm = size x (weight + bias).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from weft.core.model_shape import AttentionShape, ExtraShape, LinearShape, MoeShape, NormShape, Style
from weft.zoo.config import Config, Flag, Size
from weft.zoo.declared import Declared

Place = Literal["residual", "query", "key", "other"]
NormKind = Literal["rms", "layer"]


class Parts(Declared):
    """Matrices, norms and other parameters with the facts that activation memory needs."""

    linears: tuple[LinearShape, ...] = ()
    norms: tuple[NormShape, ...] = ()
    extras: tuple[ExtraShape, ...] = ()
    attention: AttentionShape | None = None
    moe: MoeShape | None = None
    mlp_width: int = 0
    is_gated: bool = True
    activation: str = ""


class Piece(Protocol):
    """A declared piece of a block."""

    def parts(self, config: Config) -> Parts: ...


class Heads(Protocol):
    """A declaration that knows the heads of softmax attention."""

    def shape(self, config: Config) -> AttentionShape: ...


class Norm(Declared):
    """How a family normalises: the kind, and which of weight and bias it learns."""

    kind: NormKind = "rms"
    weight: Flag = True
    bias: Flag = False

    def shape(
        self, config: Config, name: str, size: Size, *, place: Place = "residual", per: int = 1, copies: int = 1
    ) -> NormShape:
        """`per` vectors a token are normalised, with `copies` sets of weights between them."""
        width = config.sized(size)
        learned = int(config.flag(self.weight)) + int(config.flag(self.bias))
        return NormShape(
            name=name, size=width, kind=self.kind, num_parameters=copies * width * learned, place=place, per=per
        )


RMS = Norm()
LAYER = Norm(kind="layer", bias=True)
LAYER_NO_BIAS = Norm(kind="layer")
BARE_LAYER = Norm(kind="layer", weight=False)
BARE_RMS = Norm(weight=False)


Role = Literal["attention", "mlp", "expert", "shared_expert", "router", "other"]


class Matrix(NamedTuple):
    """One declared matrix: `name: rows -> out`."""

    name: str
    rows: Size
    out: Size
    style: Style = "replicated"
    bias: Flag = False
    role: Role = "other"
    when: Flag = True
    copies: Size = 1
    active: Size = 1

    def shape(self, config: Config, prefix: str) -> LinearShape:
        return LinearShape(
            name=prefix + self.name,
            in_features=config.sized(self.rows),
            out_features=config.sized(self.out),
            bias=config.flag(self.bias),
            style=self.style,
            role=self.role,
            copies=config.sized(self.copies),
            active=config.sized(self.active),
        )


class Listed(Declared):
    """A piece whose parameters are listed one by one: state-space mixers, convolutions, odd additions to attention."""

    prefix: str = ""
    matrices: tuple[Matrix, ...] = ()
    norms: tuple[tuple[str, Size, Norm], ...] = ()
    extras: tuple[tuple[str, Size], ...] = ()  # an extra of size zero is not there
    attention: Heads | None = None  # where the matrices above serve softmax attention

    def parts(self, config: Config) -> Parts:
        extras = (ExtraShape(name=self.prefix + name, num_parameters=config.sized(size)) for name, size in self.extras)
        return Parts(
            linears=tuple(each.shape(config, self.prefix) for each in self.matrices if config.flag(each.when)),
            norms=tuple(norm.shape(config, self.prefix + name, size, place="other") for name, size, norm in self.norms),
            extras=tuple(extra for extra in extras if extra.num_parameters),
            attention=None if self.attention is None else self.attention.shape(config),
        )


class Several(Declared):
    """Pieces side by side in one block, such as attention and a state-space mixer; the first attention counts."""

    pieces: tuple[Piece, ...]

    def parts(self, config: Config) -> Parts:
        return joined(tuple(piece.parts(config) for piece in self.pieces))


def joined(found: tuple[Parts, ...]) -> Parts:
    mlp = next((part for part in found if part.mlp_width or part.activation), Parts())
    return Parts(
        linears=tuple(linear for part in found for linear in part.linears),
        norms=tuple(norm for part in found for norm in part.norms),
        extras=tuple(extra for part in found for extra in part.extras),
        attention=next((part.attention for part in found if part.attention is not None), None),
        moe=next((part.moe for part in found if part.moe is not None), None),
        mlp_width=mlp.mlp_width,
        is_gated=mlp.is_gated,
        activation=mlp.activation,
    )
