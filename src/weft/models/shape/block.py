"""One block as a `BlockShape`: its matrices with their shards and roles, norms, other parameters.

Every parameter of the block is in exactly one of them. Shards come from the regions of tensor parallelism; roles from
the region that holds a matrix, or from its name where it is in none.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from weft.core.model_shape import AttentionShape, BlockShape, ExtraShape, LinearShape, MoeShape, NormShape, Style
from weft.models.adapter.lora import LoraFactor
from weft.models.adapter.quantised import bytes_in_codes
from weft.models.shape.attention import ATTENTION, CROSS, find_attention, read_attention
from weft.models.shape.experts import SHARED, Experts, is_last
from weft.models.tp.layout import Region, TensorLayout
from weft.models.tp.roles import linear_facts, looks_like_norm

Role = Literal["attention", "mlp", "expert", "shared_expert", "router", "other"]
_ROLE_OF_REGION: dict[str, Role] = {"attention": "attention", "mlp": "mlp", "experts": "expert"}
_ROUTER = re.compile(r"(^|\.)(router|gate|moe_router|classifier)(\.(?!gate_proj|g_proj)|$)")
_ROUTER_CLASS = re.compile(r"Router|TopKGate|Gating|MoEGate|MoeGate")
_MLP = re.compile(r"mlp|feed_?forward|ffn|(^|\.)(fc\d|intermediate|dense_h|w\d|Wi)", re.IGNORECASE)
_RATES = ("hidden_dropout", "residual_dropout", "resid_dropout", "activation_dropout")


@dataclass(frozen=True, kw_only=True)
class _Site:
    """A module of a block."""

    block: str
    path: str  # in the block
    module: nn.Module
    experts: Experts
    homes: list[str]  # modules of softmax attention
    attention: AttentionShape | None

    @property
    def name(self) -> str:
        return f"{self.block}.{self.path}" if self.path else self.block

    @property
    def is_in_attention(self) -> bool:
        return any(self.name.startswith(f"{home}.") for home in self.homes)

    def child(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


class BlockReader:
    """Reads the blocks of one model."""

    def __init__(self, model: nn.Module, tensors: TensorLayout, config: Any) -> None:
        self._model, self._tensors, self._config = model, tensors, config
        self._styles: dict[str, Style] = {}
        self._roles: dict[str, Role] = {}
        for region in tensors.regions:
            for linear in region.linears:
                self._styles[linear.name] = linear.side
                self._roles[linear.name] = _ROLE_OF_REGION[region.kind]
            for tensor in region.tensors:
                self._styles[tensor.name] = _tensor_style(region, tensor.name)
        self._seen: set[int] = set()

    def read(self, name: str) -> BlockShape:
        """The block of that name. A parameter that an earlier block holds too is counted there."""
        block = self._model.get_submodule(name)
        regions = [region for region in self._tensors.regions if f"{region.name}.".startswith(f"{name}.")]
        experts, homes = Experts(block), find_attention(name, block, regions)
        attention = self._attention(homes[0], regions) if homes else None
        linears: list[LinearShape] = []
        norms: list[NormShape] = []
        extras: list[ExtraShape] = []
        for path, module in block.named_modules():
            site = _Site(
                block=name, path=path, module=module, experts=experts, homes=homes, attention=attention
            )  # fmt: skip
            own = {key: one for key, one in module.named_parameters(recurse=False) if id(one) not in self._seen}
            self._seen |= {id(one) for one in own.values()}
            if looks_like_norm(module) and not module._modules:
                norms.append(self._norm(site, own))
                continue
            linears += self._pop_linears(site, own)
            extras += self._extras(site, own)
        merged = _merged([linear for linear in linears if linear.num_parameters])
        moe = experts.shape(merged)
        return BlockShape(
            kind=_kind(attention, moe, merged),
            linears=merged,
            norms=tuple(norms),
            extras=tuple(extras),
            attention=attention,
            moe=moe,
            mlp_width=max((one.in_features for one in merged if one.role == "mlp" and is_last(one)), default=0),
            dropout=_stream_dropout(block),
        )

    def _attention(self, home: str, regions: list[Region]) -> AttentionShape | None:
        region = next((one for one in regions if one.name == home), None)
        index = next((int(part) for part in home.split(".") if part.isdigit()), 0)
        return read_attention(self._model.get_submodule(home), region, self._config, index=index)

    def _pop_linears(self, site: _Site, own: dict[str, nn.Parameter]) -> list[LinearShape]:
        """Matrices among the parameters `own` of a module, which lose them: a linear, fused experts, a router."""
        facts, weight = linear_facts(site.name, site.module), own.get("weight")
        is_linear = facts is not None or isinstance(site.module, nn.Linear)
        is_router = site.experts.count > 0 and _ROUTER_CLASS.search(type(site.module).__name__) is not None
        if isinstance(site.module, LoraFactor):
            return []
        if weight is None or weight.ndim != 2 or not (is_linear or is_router):
            fused = site.experts.pop_matrices(site.path, site.module, own, hidden_size=self._tensors.hidden_size)
            return [replace(one, style=self._style(f"{site.block}.{one.name}")) for one in fused]
        del own["weight"]
        is_transposed = facts is not None and facts.is_transposed
        inputs, outputs = weight.shape if is_transposed else reversed(weight.shape)
        return [
            LinearShape(
                name=site.experts.general_name(site.path),
                in_features=inputs,
                out_features=outputs,
                bias=own.pop("bias", None) is not None,
                style=self._style(site.name),
                role=self._role(site) if is_linear else "router",
                active=0 if CROSS.search(site.path) else site.experts.num_active(site.path),
                is_transposed=is_transposed,
                is_trained=weight.requires_grad,
                code_bytes=bytes_in_codes(site.module),
            )
        ]

    def _style(self, name: str) -> Style:
        return self._styles.get(name, "replicated")

    def _role(self, site: _Site) -> Role:
        if SHARED.search(site.path):
            return "shared_expert"
        if site.experts.is_expert(site.path):
            return "expert"
        if site.name in self._roles:
            return self._roles[site.name]
        if site.experts.count and _ROUTER.search(site.path):
            return "router"
        if site.is_in_attention or CROSS.search(site.path):
            return "attention"
        return "mlp" if _MLP.search(site.path) else "other"

    def _norm(self, site: _Site, own: dict[str, nn.Parameter]) -> NormShape:
        weight = next(iter(own.values()), None)
        width = site.attention.head_dim if site.attention and site.is_in_attention else self._tensors.hidden_size
        size = weight.shape[-1] if weight is not None else _normalised_size(site.module, width)
        place, per = self._place(site, size), 1
        if site.attention is not None and size == site.attention.head_dim:
            per = {"query": site.attention.num_heads, "key": site.attention.num_kv_heads}.get(place, 1)
        return NormShape(
            name=site.path,
            size=size,
            kind="layer" if is_layer_norm(site.module) else "rms",
            num_parameters=sum(one.numel() for one in own.values()),
            place=place,
            per=per,
            is_fused=isinstance(site.module, nn.LayerNorm | nn.RMSNorm),
            is_trained=weight is None or weight.requires_grad,
        )

    def _place(self, site: _Site, size: int) -> Literal["residual", "query", "key", "other"]:
        parent, _, last = site.path.lower().rpartition(".")
        if ATTENTION.search(parent) and "indexer" not in parent:
            if last.startswith("q") and "_a_" not in last:
                return "query"
            if last.startswith("k") and not last.startswith("kv"):
                return "key"
        is_stream = site.name in self._tensors.norms or (not parent and size == self._tensors.hidden_size)
        return "residual" if is_stream else "other"

    def _extras(self, site: _Site, own: dict[str, nn.Parameter]) -> list[ExtraShape]:
        return [
            ExtraShape(
                name=site.child(key),
                num_parameters=one.numel(),
                style=self._style(f"{site.name}.{key}"),
                row_size=one.numel() // one.shape[0] if one.ndim > 1 else 1,
                is_trained=one.requires_grad,
                is_factor=isinstance(site.module, LoraFactor),
            )
            for key, one in own.items()
            if one.numel()
        ]


def is_layer_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or "LayerNorm" in type(module).__name__


def _tensor_style(region: Region, name: str) -> Style:
    return "row" if region.kind == "experts" and name.endswith("down_proj") else "column"


def _merged(linears: list[LinearShape]) -> tuple[LinearShape, ...]:
    """One entry per name: the experts of a list are copies of one matrix."""
    counts = Counter(linear.name for linear in linears)
    first = {linear.name: linear for linear in reversed(linears)}
    return tuple(
        replace(first[name], copies=counts[name]) if counts[name] > 1 else first[name]
        for name in dict.fromkeys(linear.name for linear in linears)
    )


def _kind(attention: AttentionShape | None, moe: MoeShape | None, linears: tuple[LinearShape, ...]) -> str:
    """The dense block of full attention is "dense"; others are named by what differs."""
    roles = {linear.role for linear in linears}
    feed = "moe" if moe is not None else "dense" if "mlp" in roles else ""
    if attention is None:
        mixer = "linear" if roles & {"other", "attention"} else ""
    else:
        mixer = "sliding" if attention.window is not None else "" if feed else "attention"
    if mixer and feed == "dense":
        return mixer
    return "_".join(filter(None, (mixer, feed))) or "block"


def _stream_dropout(block: nn.Module) -> float:
    """The largest rate of a dropout on the residual stream."""
    own = vars(block).get("dropout")
    rates = [own] if isinstance(own, float) else [0.0]
    for path, module in block.named_modules():
        if isinstance(module, nn.Dropout) and not re.search(r"attn_drop|attention_drop", path):
            rates.append(module.p)
        rates += [value for value in (vars(module).get(name) for name in _RATES) if isinstance(value, float)]
    return max(rates)


def _normalised_size(module: nn.Module, default: int) -> int:
    value = getattr(module, "normalized_shape", None)
    if isinstance(value, tuple):
        return int(value[-1])
    return default
