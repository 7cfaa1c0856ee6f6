"""The plan explorer: a plan from the page's sliders, estimated by the planner in this process. No torch.

The page sends degrees; the number of shards (`mesh.dp_shard`) is what is left of the devices. A plan that is not legal
is an answer too: the planner's sentence and hint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft import hardware, zoo
from weft.core.errors import InputError, MeshError, WeftError
from weft.core.json_files import parse_json_table
from weft.core.plan import Plan
from weft.core.terms import MemoryTerm, StepTerm
from weft.plan.ask import estimate_plan, search_plans
from weft.plan.estimate import Estimate
from weft.plan.words import describe

DEGREES = ("tp", "pp", "cp", "ep", "dp_replicate")
SHARDED_BY = ("tp", "pp", "cp", "dp_replicate")
KEYS = {  # of a request -> of plan.toml
    **{degree: f"mesh.{degree}" for degree in DEGREES},
    "zero": "data_parallel.zero",
    "microbatches": "pipeline.microbatches",
    "schedule": "pipeline.schedule",
    "virtual_stages": "pipeline.virtual_stages",
    "recompute": "activations.policy",
    "precision": "precision.preset",
    "offload": "offload.optimizer",
}
WORKLOAD = ("global_batch", "sequence_length")


def choices() -> dict[str, Any]:
    """The models and devices that the page offers."""
    return {"models": zoo.names(), "devices": hardware.device_names()}


def explore(asked: Mapping[str, str]) -> dict[str, Any]:
    """The estimate of one plan: memory and time by term. `asked`: a request's query."""
    model, devices = _required(asked, "model"), _required(asked, "devices")
    return _as_dict(estimate_plan(model, _plan(asked, devices), devices, **_workload(asked)))


def best(asked: Mapping[str, str]) -> dict[str, Any]:
    """The planner's first choice for a model on devices, with the values of the sliders."""
    answer = search_plans(_required(asked, "model"), _required(asked, "devices"), **_workload(asked), top=1)
    if not answer.plans:
        raise InputError("no plan is legal for this model on these devices", hint="choose other devices")
    found = answer.plans[0]
    tables = found.plan.model_dump(mode="json")
    sliders = {key: tables[path.partition(".")[0]][path.partition(".")[2]] for key, path in KEYS.items()}
    base = found.plan.model_dump(mode="json", exclude_none=True)  # keys without a slider stay as they are there
    return {**_as_dict(found), "sliders": sliders, "base": base, "considered": answer.considered}


def answered(question: Any, asked: Mapping[str, str]) -> dict[str, Any]:
    """The answer, or the planner's refusal."""
    try:
        return dict(question(asked))
    except WeftError as error:
        return error.as_dict()


def _plan(asked: Mapping[str, str], devices: str) -> Plan:
    tables = _base(asked.get("base", ""))
    for key, path in KEYS.items():
        if asked.get(key):
            section, _, name = path.partition(".")
            tables.setdefault(section, {})[name] = _value(asked[key])
    mesh = tables.setdefault("mesh", {})
    num_devices, taken = hardware.cluster(devices).num_devices, 1
    for degree in SHARDED_BY:
        taken *= max(1, int(mesh.get(degree, 1)))
    if num_devices % taken:
        raise MeshError(
            f"{' x '.join(SHARDED_BY)} is {taken}, which does not divide {num_devices} devices",
            hint="lower one of the degrees",
        )
    zero = int(tables.get("data_parallel", {}).get("zero", 0))
    rest = num_devices // taken
    mesh["dp_shard"] = rest if zero else 1
    if not zero:
        mesh["dp_replicate"] = int(mesh.get("dp_replicate", 1)) * rest
    return Plan.from_tables(tables, source="the sliders")


def _base(text: str) -> dict[str, Any]:
    """The tables below those of the sliders."""
    try:
        found = parse_json_table(text or "{}")
    except ValueError as error:
        raise InputError(f"base is not a plan: {error}", hint="reload the page") from None
    return {key: dict(value) if isinstance(value, dict) else value for key, value in found.items()}


def _value(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _workload(asked: Mapping[str, str]) -> dict[str, Any]:
    found = {key: asked[key] for key in WORKLOAD if asked.get(key)}
    for key, text in found.items():
        if not text.isdecimal() or not int(text):
            raise InputError(f"{key} is not a number: {text}", hint="give a whole number above zero")
    return {key: int(text) for key, text in found.items()}


def _required(asked: Mapping[str, str], key: str) -> str:
    if not asked.get(key):
        raise InputError(f"no {key} was given", hint=f"choose a {key.removesuffix('s')}")
    return asked[key]


def _as_dict(found: Estimate) -> dict[str, Any]:
    order = [str(term) for term in (*MemoryTerm, *StepTerm)]

    def ordered(terms: Mapping[str, float]) -> dict[str, float]:
        return dict(sorted(terms.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))

    return {
        "words": describe(found.plan),
        "fits": found.fits,
        "memory_bytes": found.memory_bytes,
        "memory_terms": ordered(found.memory_terms),
        "peak_at": found.peak_at,
        "step_s": found.step_s,
        "time_terms": ordered(found.time_terms),
        "mfu": found.mfu,
        "tokens_per_s": found.tokens_per_s,
        "plan_toml": found.plan.to_toml(),
    }
