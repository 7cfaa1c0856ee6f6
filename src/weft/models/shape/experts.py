"""The experts of a block: their number, how many a token uses, and the sizes of their matrices.

They are fused in bare parameters ([experts, out, in] or transposed), or a list of modules.
"""

from __future__ import annotations

import re

from torch import nn

from weft.core.model_shape import LinearShape, MoeShape

SHARED = re.compile(r"shared_(expert|mlp)")
_EXPERTS = re.compile(r"expert", re.IGNORECASE)
_EXPERT_COUNTS = ("num_experts", "moe_num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = (
    "top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "topk", "num_selected_experts",
    "experts_top_k", "moe_topk",
)  # fmt: skip
_LAST = {
    "down_proj", "fc2", "w2", "c_proj", "dense_4h_to_h", "output_linear", "Wo", "fc_out", "lin2", "proj_down",
}  # fmt: skip


class Experts:
    """The experts of one block; `count` is 0 without any."""

    def __init__(self, block: nn.Module) -> None:
        self.count, self.home, self.is_list = 0, "", False
        for path, module in block.named_modules():
            if isinstance(module, nn.ModuleList) and path.endswith("experts") and len(module) > 1:
                self.count, self.home, self.is_list = len(module), path, True
                break
            count = _num_fused(path, module)
            if count > 1 and not SHARED.search(path):
                self.count, self.home = count, path
                break
        self.top_k = _top_k(block, self.count) if self.count else 1

    def is_expert(self, path: str) -> bool:
        return bool(self.count) and path.startswith(f"{self.home}.")

    def general_name(self, path: str) -> str:
        """The name with * for the number of an expert in a list."""
        if not (self.is_list and self.is_expert(path)):
            return path
        return re.sub(rf"^({re.escape(self.home)})\.\d+\.", r"\1.*.", path)

    def num_active(self, path: str) -> int:
        """Uses per token of a matrix in a list of experts."""
        return self.top_k if self.is_list and self.is_expert(path) else 1

    def pop_matrices(
        self, path: str, module: nn.Module, own: dict[str, nn.Parameter], *, hidden_size: int
    ) -> list[LinearShape]:
        """Fused experts among the bare parameters `own` of a module, which lose them; without shards."""
        if not self.count or self.is_list or not (path == self.home or _EXPERTS.search(path)):
            return []
        is_shared = SHARED.search(path) is not None
        found = []
        for key in [key for key, one in own.items() if self._is_matrix(key, one, is_home=path == self.home)]:
            weight = own.pop(key)
            copies, sizes = self._sizes(weight)
            is_transposed = _is_transposed(
                module, sizes, is_last=key.startswith(("down", "w2", "output")), hidden_size=hidden_size
            )
            into, out = sizes if is_transposed else reversed(sizes)
            bias = own.pop(f"{key}_bias", None)
            found.append(
                LinearShape(
                    name=f"{path}.{key}" if path else key,
                    in_features=into,
                    out_features=out,
                    bias=bias is not None,
                    role="shared_expert" if is_shared else "expert",
                    copies=copies,
                    active=copies if is_shared else min(self.top_k, copies),
                    is_transposed=is_transposed,
                )
            )
        return found

    def shape(self, linears: tuple[LinearShape, ...]) -> MoeShape | None:
        if not self.count:
            return None
        width = next((one.in_features for one in linears if one.role == "expert" and is_last(one)), 0)
        shared = sum(one.in_features for one in linears if one.role == "shared_expert" and is_last(one))
        return MoeShape(num_experts=self.count, top_k=self.top_k, expert_width=width, shared_width=shared)

    def _is_matrix(self, key: str, parameter: nn.Parameter, *, is_home: bool) -> bool:
        return parameter.ndim == 3 or (parameter.ndim == 2 and is_home and "bias" not in key)

    def _sizes(self, weight: nn.Parameter) -> tuple[int, tuple[int, int]]:
        """(number of experts, the two sizes of each matrix)."""
        if weight.ndim == 3:
            return weight.shape[0], (weight.shape[1], weight.shape[2])
        return self.count, (weight.shape[0] // self.count, weight.shape[1])


def is_last(linear: LinearShape) -> bool:
    """Whether it is the last matrix of an MLP: its inputs are the MLP's width."""
    return linear.style == "row" or linear.name.rpartition(".")[2] in _LAST


def _num_fused(path: str, module: nn.Module) -> int:
    """Number of experts whose matrices one module holds; 0 for other modules."""
    if not _EXPERTS.search(path + type(module).__name__) or isinstance(module, nn.Conv1d):
        return 0
    own = {key: one for key, one in module._parameters.items() if one is not None}
    cubes = {key: one.shape[0] for key, one in own.items() if one.ndim == 3}
    if cubes:
        return next((count for key, count in cubes.items() if key.startswith("down")), min(cubes.values()))
    counts = [getattr(module, name, None) for name in _EXPERT_COUNTS]
    count = next((value for value in counts if isinstance(value, int)), 0)
    flat = [one for one in own.values() if one.ndim == 2]
    return count if len(flat) > 1 and count and all(one.shape[0] % count == 0 for one in flat) else 0


def _top_k(block: nn.Module, count: int) -> int:
    """Experts per token: an attribute of a module of the block, or of its config."""
    owners = [*block.modules(), *(vars(module).get("config") for module in block.modules())]
    for owner in owners:
        own = {} if owner is None else vars(owner)
        for name in _TOP_K:
            value = own.get(name)
            if isinstance(value, int) and value > 0:
                return min(value, count)
    return 1


def _is_transposed(module: nn.Module, sizes: tuple[int, int], *, is_last: bool, hidden_size: int) -> bool:
    """Whether fused experts are stored as [experts, in, out] instead of [experts, out, in]."""
    is_transposed = getattr(module, "is_transposed", None)
    if isinstance(is_transposed, bool):
        return is_transposed
    return sizes[0] != sizes[1] and (sizes[0] == hidden_size) != is_last
