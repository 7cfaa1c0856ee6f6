"""User input to a `Request`: a model by name, config.json or run.toml, devices in text notation, a workload.

`search_plans` and `estimate_plan` are `weft.search` and `weft.estimate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from weft import hardware, zoo
from weft.core.config import parse, read_toml
from weft.core.errors import BadValueError, ConfigFileError, MeshError, ModelError, PlanError
from weft.core.model_shape import SCALAR_HEAD, ModelShape
from weft.core.optimizers import NAMES, OPTIMIZERS, OptimizerKind
from weft.core.plan import Plan
from weft.core.plan_checks import DATAPARALLEL_SPREADS, check_consistent
from weft.core.precision import PrecisionPolicy, impossible
from weft.core.precision_section import Precision
from weft.core.run_spec import RunSpec
from weft.core.vocabulary import BYTE_VOCABULARY, BYTES, padded
from weft.models.shape.lookup import shape_from_path, shape_from_type, shape_of
from weft.plan.estimate import Estimate, estimate
from weft.plan.memory.budget import with_chosen_mixture
from weft.plan.objective import fixed_by, keys_of, with_fixed
from weft.plan.offloaded_blocks import with_chosen_blocks
from weft.plan.plan_rows import columns_of
from weft.plan.pp.stages import Place
from weft.plan.request import AttentionKind, Request, Workload
from weft.plan.rules import check_plan
from weft.plan.search import Answer, search
from weft.plan.space import Freedom, check_fixed
from weft.zoo.hub import cached_folder, model_folder

MAX_DEFAULT_SEQUENCE = 8192
# (parameters, tokens per step): usual batch of models up to this size.
USUAL_TOKENS = ((1e9, 2**19), (4e9, 2**20), (1e11, 2**22), (float("inf"), 2**24))

Model = str | Path | Mapping[str, Any] | ModelShape | RunSpec


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request, and the values that were assumed for it."""

    request: Request
    precision: dict[str, Any]  # the tables of [precision], as plan.toml has them
    assumed: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys of plans that the run's objective fixes

    def with_host_memory(self, per_node_bytes: int) -> Question:
        """With another host memory than the catalogue's nodes have."""
        cluster = replace(self.request.cluster, host_memory_bytes=per_node_bytes)
        return replace(self, request=replace(self.request, cluster=cluster))


def ask(
    model: Model,
    devices: str,
    *,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    optimizer: str | None = None,
    precision: Mapping[str, Any] | str | None = None,
    attention: str | None = None,
    document_length: float | None = None,
    calibration: Path | None = None,
) -> Question:
    """The request for this input. Missing values come from run.toml or from usual values, which are reported.

    `document_length`: of rows whose documents do not attend to each other (`Workload`)."""
    shape, run = resolve_model(model)
    cluster = hardware.cluster(devices, calibration=calibration)
    assumed = []
    if sequence_length is None and run is None:
        sequence_length = min(shape.max_positions or MAX_DEFAULT_SEQUENCE, MAX_DEFAULT_SEQUENCE)
        assumed.append(f"sequences of {sequence_length:,} tokens (--sequence-length)")
    sequence = sequence_length or cast(RunSpec, run).data.sequence_length
    if global_batch is None and run is None:
        global_batch = usual_batch(shape, sequence, num_devices=cluster.num_devices)
        assumed.append(f"a global batch of {global_batch:,} sequences (--global-batch)")
    tables = _precision_tables(precision)
    per_sample = run.objective.rows_per_sample if run else 1
    workload = Workload(
        global_batch=(global_batch or cast(RunSpec, run).train.global_batch) * per_sample,
        rows_per_sample=per_sample,
        sequence_length=sequence,
        optimizer=_optimizer(optimizer, run),
        optimizer_kernel=run.train.optimizer_kernel if run else "auto",
        momentum=run.train.momentum if run else 0.9,
        attention=_attention(attention, run),
        muon_precision=run.train.muon_precision if run else "auto",
        has_average=bool(run and run.train.ema_decay),
        teacher=teacher_of(run) if run else None,
        document_length=_document_length(document_length, run, sequence),
    )
    request = Request(shape=shape, cluster=cluster, workload=workload, precision=_policy(tables))
    notes = (*assumed, *shape.notes, *_attention_notes(request))
    return Question(request=request, precision=tables, assumed=notes, fixed=fixed_by(run))


def search_plans(
    model: Model,
    devices: str,
    *,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    attention: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    top: int = 5,
) -> Answer:
    """The best plans for `model` on `devices`; `fixed` narrows the search: {"mesh.tp": 8}.

    `attention`: sdpa (the default of training), eager, or fused (a kernel for every variant of attention).
    """
    for sentence, hint in check_fixed(fixed or {}):
        raise BadValueError(sentence, hint=hint)
    question = ask(
        model,
        devices,
        global_batch=global_batch,
        sequence_length=sequence_length,
        optimizer=optimizer,
        precision=precision,
        attention=attention,
    )
    chosen = with_fixed(question.fixed, fixed or {})
    return search(question.request, freedom=Freedom(fixed=chosen), precision=question.precision, top=top)


def estimate_plan(
    model: Model,
    plan: Plan,
    devices: str,
    *,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    optimizer: str | None = None,
    attention: str | None = None,
    place: Place | None = None,
) -> Estimate:
    """Costs of `plan`, of the pipeline rank at `place` if given. Raises with the reason if the plan is illegal."""
    question = ask(
        model,
        devices,
        global_batch=global_batch,
        sequence_length=sequence_length,
        optimizer=optimizer,
        precision=plan.precision.model_dump(exclude_none=True),
        attention=attention,
    )
    with_fixed(question.fixed, keys_of(plan))
    request = replace(question.request, tp_may_leave_node=True)
    plan = with_chosen_blocks(request, with_chosen_mixture(request, plan))
    require_planned(request, plan)
    return estimate(request, plan, place=place)


def require_planned(request: Request, plan: Plan, *, source: str = "the plan") -> None:
    """Raise the first reason against planning `plan` for this model and cluster."""
    for sentence, hint in check_consistent(plan):
        raise PlanError(f"{source}: {sentence}", hint=hint)
    _require_ranks(request, plan, source=source)
    if plan.num_ranks != request.cluster.num_devices:
        raise MeshError(
            f"{source} has {plan.num_ranks} ranks but there are {request.cluster.num_devices} devices",
            hint=f"--devices must name {plan.num_ranks} of them, or change [mesh]",
        )
    for sentence, hint in check_plan(request, columns_of([plan])):
        raise PlanError(f"{source}: {sentence}", hint=hint)


def _require_ranks(request: Request, plan: Plan, *, source: str) -> None:
    """Refuse nn.DataParallel: it has no ranks, so the estimate would be that of one device."""
    if plan.data_parallel.strategy != "dataparallel":
        return
    num_gpus = 0 if request.is_cpu else request.cluster.num_devices
    found = {0: "there is none here", 1: "there is one here"}.get(num_gpus, "the planner has no formulas for it")
    raise PlanError(
        f"{source}: {DATAPARALLEL_SPREADS}, and {found}",
        hint="drop the strategy key; use DDP (mesh.dp_replicate = N) for several devices",
    )


def resolve_model(model: Model) -> tuple[ModelShape, RunSpec | None]:
    """The shape of a model, and its run if `model` is one."""
    if isinstance(model, ModelShape):
        return model, None
    if isinstance(model, RunSpec):
        return _shape_of_run(model), model
    if isinstance(model, Mapping):
        return shape_of(model), None
    path = Path(model)
    if path.suffix == ".toml":
        run = RunSpec.from_tables(read_toml(path), source=str(path))
        return _shape_of_run(run), run
    if path.exists():
        return shape_from_path(path), None
    if path.suffix == ".json":
        raise ConfigFileError(
            f"there is no file {path}", hint="give a config.json, a folder with one, or a model's name"
        )
    return _shape_of_name(str(model), {}, revision=None), None


def teacher_of(run: RunSpec) -> ModelShape | None:
    """The shape of the teacher of a distillation."""
    if run.objective.teacher is None:
        return None
    path = Path(run.objective.teacher).expanduser()
    return shape_from_path(path) if path.exists() else _shape_of_name(run.objective.teacher, {}, revision=None)


def usual_batch(shape: ModelShape, sequence_length: int, *, num_devices: int) -> int:
    """Usual sequences per step for models of this size: a power of two, at least one per device."""
    tokens = next(tokens for parameters, tokens in USUAL_TOKENS if shape.num_parameters <= parameters)
    sequences = max(1, tokens // sequence_length)
    while sequences < min(num_devices, 1024):
        sequences *= 2
    multiple = num_devices & -num_devices  # keeps the batch divisible if the number of devices is no power of two
    odd = num_devices // multiple
    return sequences * odd if odd > 1 else sequences


def _shape_of_run(run: RunSpec) -> ModelShape:
    spec, adapter = run.model, run.adapter if run.adapter.is_on else None
    has_scores = spec.head == "scalar"
    config = {**spec.config, SCALAR_HEAD: True} if has_scores else spec.config
    if spec.type is not None:
        return _with_tokens(shape_from_type(spec.type, config, adapter=adapter), run)
    path = Path(str(spec.path)).expanduser()
    if path.exists():
        return shape_from_path(path, config, adapter=adapter)
    if adapter is not None:
        cached = model_folder(str(spec.path), revision=spec.revision)
        return shape_from_path(cached, config, name=str(spec.path), adapter=adapter)
    shape = _shape_of_name(str(spec.path), spec.config, revision=spec.revision)
    return replace(shape.scored if has_scores else shape, name=str(spec.path))


def _shape_of_name(name: str, overrides: Mapping[str, Any], *, revision: str | None) -> ModelShape:
    """The shape of a model in the zoo, or of one whose config.json is in the Hugging Face cache."""
    if (overrides or revision) and (cached := cached_folder(name, revision=revision)) is not None:
        return shape_from_path(cached, overrides, name=name)
    if overrides:
        raise ModelError(
            f"{name} with config overrides cannot be planned: its config.json is not in the Hugging Face cache",
            hint=f"give model.path a folder with config.json, or download it: hf download {name} config.json",
        )
    try:
        return zoo.named(name)
    except ModelError:
        if (cached := cached_folder(name, revision=revision)) is None:
            raise
        return shape_from_path(cached, name=name)


def _with_tokens(shape: ModelShape, run: RunSpec) -> ModelShape:
    """`shape` with the tokenizer's vocabulary if the config of a random-weight model has no vocab_size."""
    given = run.model.config
    if any("vocab_size" in table for table in (given, *given.values()) if isinstance(table, dict)):
        return shape  # given for the model or for its text config
    if run.tokenizer == BYTES:
        return replace(shape, vocab_size=padded(BYTE_VOCABULARY))
    note = f"the vocabulary of {shape.model_type} is the default of the type; training uses that of {run.tokenizer}"
    return replace(shape, is_exact=False, notes=(*shape.notes, note))


def _optimizer(given: str | None, run: RunSpec | None) -> OptimizerKind:
    name = given or (run.train.optimizer if run else "adamw")
    if name not in OPTIMIZERS:
        raise BadValueError(f"there is no optimizer {name!r}", hint=NAMES)
    return name


def _attention(given: str | None, run: RunSpec | None) -> AttentionKind:
    """The attention kind: given, from run.toml, or the default of training."""
    name = given or (run.model.attention if run else "sdpa")
    if name not in get_args(AttentionKind):
        raise BadValueError(f"there is no attention {name!r}", hint=" | ".join(get_args(AttentionKind)))
    return cast(AttentionKind, name)


def _attention_notes(request: Request) -> list[str]:
    """Notes on attention that sdpa does not compute: it costs several times as much."""
    kinds = [block.attention for block in request.shape.kinds if block.attention is not None]
    family = request.shape.model_type
    if request.workload.attention == "fused" and any(kind.materialises_scores for kind in kinds):
        return [f"a fused kernel for {family}'s attention; weft trains it with written-out scores (model.attention)"]
    if request.workload.attention == "sdpa" and any(request.writes_scores(kind) for kind in kinds):
        return [
            "attention scores are written out, as in training: sdpa has no kernel for them "
            "(--set model.attention=fused assumes one)"
        ]
    return []


def _document_length(given: float | None, run: RunSpec | None, sequence_length: int) -> float | None:
    if given is None:
        return None
    if run is not None and not run.data.trains_isolated:
        raise BadValueError(
            f"data.document_length = {given:g} is given, but rows of this run are whole: a token sees all before it",
            hint="leave it out, or set data.packing = 'documents' in run.toml",
        )
    if not 1 <= given <= sequence_length:
        raise BadValueError(
            f"data.document_length = {given:g} is not between 1 and the {sequence_length:,} tokens of a row",
            hint="it is the mean length of the document that a token is in, which is at most a row",
        )
    return given


def _precision_tables(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if given is None:
        return {"preset": "bf16"}
    return {"preset": given} if isinstance(given, str) else dict(given)


def _policy(tables: dict[str, Any]) -> PrecisionPolicy:
    policy = parse(Precision, tables, source="precision").policy()
    for sentence, hint in impossible(policy):
        raise BadValueError(sentence, hint=hint)
    return policy
