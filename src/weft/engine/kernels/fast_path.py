"""Records which fast techniques an engine uses, after its first step. It decides nothing. Collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.core.executable import why_not_compiled, why_not_fused
from weft.core.records import TechniqueRecord
from weft.engine.activations.dropout import uses_randomness
from weft.engine.kernels.compiled import failures
from weft.engine.kernels.float8_products import has_kernel
from weft.engine.kernels.triton_here import has_triton
from weft.engine.optim.adamw_low import AdamWLow

if TYPE_CHECKING:
    from weft.engine.engine import Engine


def fast_path(engine: Engine) -> list[TechniqueRecord]:
    return [_blocks(engine), _loss(engine), _optimizer(engine), _attention(engine), _float8(engine), _copies(engine)]


def _blocks(engine: Engine) -> TechniqueRecord:
    if not engine.plan.compile.enabled:
        other = why_not_compiled(engine.plan)
        why = f"not built with {other}" if other else "compile.enabled is false"
        return TechniqueRecord(technique="compiled blocks", on=False, why=why)
    if uses_randomness(engine.model):
        return TechniqueRecord(technique="compiled blocks", on=False, why="the model has dropout")
    failed = failures(engine.model)
    if failed:
        return TechniqueRecord(technique="compiled blocks", on=False, why=f"the compiler failed: {failed[0]}")
    count = len(engine.layout.blocks)
    return TechniqueRecord(technique="compiled blocks", on=count > 0, why=f"{count} blocks{_here(engine)}")


def _here(engine: Engine) -> str:
    return " of this rank's stages" if engine.axes.partitioning else ""


def _loss(engine: Engine) -> TechniqueRecord:
    head = engine.head_loss
    if head is None:
        asked = engine.plan.kernels.loss == "fused"
        other = why_not_fused(engine.plan)
        left_out = f"not built with {other}" if other else "kernels.loss is 'whole'"
        why = "; ".join(engine.notes) if asked else left_out
        return TechniqueRecord(technique="fused head and loss", on=False, why=why)
    cause = _full_logits_cause(engine, head.full_logits_cause)
    if cause:
        return TechniqueRecord(
            technique="fused head and loss", on=False, why=f"the model's code needs the full logits: {cause}"
        )
    return TechniqueRecord(technique="fused head and loss", on=True, why="logits exist in chunks")


def _full_logits_cause(engine: Engine, asked: str) -> str:
    """The operation that needed full logits; in a pipeline only ranks of the last stage have recorded it."""
    count = torch.tensor([float(bool(asked))], device=engine.device)
    engine.topology.sum_over(count, engine.axes.partitioning)
    return asked or ("on the last stage" if count.item() else "")


def _optimizer(engine: Engine) -> TechniqueRecord:
    group = engine.optimizer.param_groups[0]
    is_on = bool(group.get("fused")) or isinstance(engine.optimizer, AdamWLow)
    return TechniqueRecord(
        technique="fused optimizer", on=is_on, why=type(engine.optimizer).__name__ + ("" if is_on else ", not fused")
    )


def _attention(engine: Engine) -> TechniqueRecord:
    kind = str(getattr(getattr(engine.model, "config", None), "_attn_implementation", None) or "the module's own")
    is_on = kind not in ("eager", "the module's own")
    why = f"{kind}, {engine.attention.chosen}" if is_on else kind
    return TechniqueRecord(technique="fused attention", on=is_on, why=why)


def _float8(engine: Engine) -> TechniqueRecord:
    chosen = sum(engine.float8.values())
    float8 = engine.plan.float8
    if float8.linears == float8.experts == "none":
        return TechniqueRecord(technique="float8 products", on=False, why="float8.linears is 'none'")
    what = "linear layers" if float8.experts == "none" else "linear layers and matrices of experts"
    units = "in float8 units" if has_kernel(float8.recipe, engine.device) else "emulated in float32"
    why = f"{chosen} of {len(engine.float8)} {what} of the blocks{_here(engine)}, {float8.recipe}, {units}"
    if engine.strategy.num_in_float8:
        why += f", {engine.strategy.num_in_float8} of their weights gathered in float8"
    return TechniqueRecord(technique="float8 products", on=chosen > 0, why=why)


def _copies(engine: Engine) -> TechniqueRecord:
    if engine.plan.data_parallel.zero == 0:
        why = "nothing is sharded"
    elif engine.plan.kernels.gradient_copy == "torch":
        why = "kernels.gradient_copy is 'torch'"
    else:
        why = "" if engine.device.type == "cuda" and has_triton() else "it needs a GPU and Triton"
    return TechniqueRecord(technique="own gradient copies", on=not why, why=why or "rows divide over the ranks")
