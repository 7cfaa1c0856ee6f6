"""Layouts that do not train adapters yet, and why: one (sentence, hint) each. Declarations alone; no torch."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.adapter_spec import AdapterSpec
from weft.core.plan import Plan


def check_adapter(plan: Plan, adapter: AdapterSpec) -> Iterator[tuple[str, str]]:
    """Every reason against training `adapter` under `plan`."""
    if not adapter.is_on:
        return
    tp, mode = plan.mesh.tp, plan.tensor_parallel.mode
    for is_refused, what, hint in (
        (tp > 1 and mode != "1d", f"tensor_parallel.mode = {mode!r}", "set tensor_parallel.mode = '1d'"),
        (plan.float8.linears != "none", "float8 products (float8.linears)", "set float8.linears = 'none'"),
        (plan.offload.parameters != "none", "weights on the host (offload.parameters)", "set it to 'none'"),
        (
            plan.data_parallel.is_threaded,
            "data_parallel.strategy = 'dataparallel'",
            "set data_parallel.strategy = 'ddp'",
        ),
        (
            tp > 1 and adapter.dropout > 0,
            f"mesh.tp = {tp}: its masks of sharded inputs would depend on the layout",
            "set adapter.dropout = 0, or mesh.tp = 1",
        ),
        (
            adapter.base == "bfloat16" and plan.precision.policy().weights != "bfloat16",
            f"adapter.base = 'bfloat16' where weights compute in {plan.precision.policy().weights}",
            "set precision.preset = 'bf16', or adapter.base = 'model'",
        ),
        (
            adapter.is_quantised and plan.compile.enabled,
            f"adapter.base = {adapter.base!r} and compiled blocks (compile.enabled)",
            "set compile.enabled = false, or adapter.base = 'bfloat16'",
        ),
    ):
        if is_refused:
            subject = "adapter.dropout" if what.endswith("depend on the layout") else "[adapter]"
            yield f"this version of weft does not execute {subject} with {what}", hint
