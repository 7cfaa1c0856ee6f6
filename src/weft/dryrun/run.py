"""`dry_run`: the engine's own training step for one rank of a plan, on fake tensors. Nothing is allocated.

It usually takes two steps: the first creates the optimizer's states and finds the position of the peak, the second
classifies every live byte there. It takes three if the first peaks elsewhere, for lack of those states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from weft.checkpoint.parts import ShardTensor
from weft.core import vocabulary
from weft.core.errors import MeshError, NotBuiltError, PipelineError
from weft.core.open_choices import with_update_place
from weft.core.plan import Compile, Plan
from weft.core.records import PeakRecord
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm as Term
from weft.dryrun.allocator import AllocatorEvent, least_capacity, simulate
from weft.dryrun.compiler import compiler_without_code, why_not_followed
from weft.dryrun.fit import EXPANDABLE, FIXED
from weft.dryrun.kernels import LIBRARY_WORKSPACES_BYTES, Kernel, workspace_bytes
from weft.dryrun.record import DryRun
from weft.dryrun.teacher import allocated, teacher_skeleton
from weft.dryrun.world import FakeWorld, fake_world
from weft.engine.distillation import Distillation
from weft.engine.engine import Engine
from weft.engine.measure.meter import StepMeter, collecting_new_objects, measure_peak, tensors_at_rest
from weft.engine.measure.tracker import plain_tensors
from weft.engine.objective import Objective
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.pp.runtime import PipelineRuntime
from weft.engine.precision import torch_dtype
from weft.engine.preference import REFERENCE, objective_of
from weft.models.adapter.build import run_skeleton
from weft.models.build import build_config
from weft.models.layout import ModelLayout, describe
from weft.plan.legality import require_legal

CPU = torch.device("cpu")
MAX_STEPS = 5


def dry_run(
    run: RunSpec,
    plan: Plan,
    *,
    rank: int = 0,
    on_gpu: bool = True,
    attention: Kernel = "cudnn",
    imbalance: float = 1.0,
) -> DryRun:
    """Dry-run one rank of `plan`; `on_gpu` uses a GPU's kernels and adds their workspaces.

    `attention` is the kernel that the GPU prefers: "cudnn" on Hopper and Blackwell, "flash" on others. `imbalance`:
    in expert parallelism, tokens that reach the rank's experts, times those of an even router.
    """
    began_s = time.perf_counter()
    require_legal(plan, run)
    plan = with_update_place(plan, device_type="cuda" if on_gpu else "cpu")
    if not 0 <= rank < plan.num_ranks:
        raise MeshError(f"there is no rank {rank} among {plan.num_ranks}", hint=f"ranks are 0 to {plan.num_ranks - 1}")
    kernel = attention if on_gpu else None
    try:
        return _of_rank(run, plan, kernel, began_s, rank=rank, imbalance=imbalance)
    except Exception as error:
        why = why_not_followed(error) if plan.compile.enabled else ""
        if not why:
            raise
        found = _of_rank(run, _stand_in(run, plan), kernel, began_s, rank=rank, imbalance=imbalance)
        note = (
            f"the dry run cannot compile this model's blocks ({why}): their memory is estimated as selective recompute"
        )
        return replace(found, notes=(*found.notes, note))


def _of_rank(run: RunSpec, plan: Plan, kernel: Kernel | None, began_s: float, *, rank: int, imbalance: float) -> DryRun:
    compiler = compiler_without_code() if plan.compile.enabled else nullcontext()
    world_of_rank = fake_world(num_ranks=plan.num_ranks, rank=rank, attention=kernel, imbalance=imbalance)
    with collecting_new_objects(), compiler, world_of_rank as world:
        stage = FakeTraining(run, plan)
        try:
            with world.mode:
                found = _measure(stage, world, began_s, rank=rank)
                return replace(found, notes=(*found.notes, *_routing_notes(plan, imbalance)))
        except Exception as error:
            cause = error.__cause__ if isinstance(error, PipelineError) else error
            if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
                raise _needs_values(stage, cause) from error
            raise


def _stand_in(run: RunSpec, plan: Plan) -> Plan:
    """The plan with eager blocks that save about as much as compiled ones; fully recomputed blocks stay so."""
    policy, full = plan.activations.policy, (plan.activations.mixture or (0, 0))[0]
    num_blocks = len(describe(FakeTraining(run, plan).skeleton).blocks)
    mixed = {"policy": "budget", "mixture": (full, num_blocks - full)}
    change = {} if policy == "full" else mixed if policy == "budget" else {"policy": "selective"}
    activations = plan.activations.model_copy(update=change)
    return plan.model_copy(update={"activations": activations, "compile": Compile(enabled=False)})


def _needs_values(
    stage: FakeTraining, error: DataDependentOutputException | DynamicOutputShapeException
) -> NotBuiltError:
    return NotBuiltError(
        f"the control flow of a {stage.config.model_type!r} model depends on tensor values ({error.func}), "
        "which a dry run does not have",
        hint="weft plan estimates it; weft train runs it",
    )


def _measure(stage: FakeTraining, world: FakeWorld, began_s: float, *, rank: int) -> DryRun:
    loading_bytes = measure_peak(stage.build, device_type=CPU.type)
    stage.expect_messages()
    recorder = _Recorder(world)
    meter = StepMeter(
        stage.engine,
        workspace=workspace_bytes if world.on_gpu else None,
        allocated=recorder.allocated if world.on_gpu else None,
    )
    world.live.count = lambda: meter.live_bytes
    with meter.measuring():
        for _ in range(MAX_STEPS):
            meter.next_step()
            stage.step()
            if meter.is_exact:
                break
        else:
            raise RuntimeError(f"no two of {MAX_STEPS} dry steps peak at the same operator")
    return DryRun(
        rank=rank,
        world_size=stage.plan.num_ranks,
        peak=_with_library(meter.peak) if world.on_gpu else meter.peak,
        reserved_bytes=recorder.reserved() if world.on_gpu else {},
        moments={"loading_bytes": loading_bytes, **_other_moments(stage)},
        traffic=meter.traffic,
        flops=meter.flops,
        num_parameters=stage.num_parameters,
        elapsed_s=time.perf_counter() - began_s,
        notes=_notes(stage),
        host_terms=stage.engine.host_terms(),
        file_terms=dict(stage.engine.offload.memory.outside.files) if stage.engine.offload is not None else {},
        least_bytes=recorder.least() if world.on_gpu else None,
    )


def _other_moments(stage: FakeTraining) -> dict[str, int]:
    """Peaks of evaluation and of resuming, which allocates states before it reads them; host memory of saving."""
    engine = stage.engine
    found = {"evaluation_bytes": measure_peak(stage.evaluate, device_type=CPU.type, at_rest=tensors_at_rest(engine))}
    if engine.offload is None:  # offloaded states exist from the start, on the host
        engine.optimizer.state.clear()
    found["resuming_bytes"] = measure_peak(engine.state, device_type=CPU.type, at_rest=tensors_at_rest(engine))
    shards = [tensor.local if isinstance(tensor, ShardTensor) else tensor for tensor in engine.state().values()]
    parts = [part for shard in shards for part in plain_tensors(shard)]
    return {**found, "saving_host_bytes": sum(part.nbytes for part in parts)}


class _Recorder:
    """The trace of a rank's allocations for the allocator's simulation."""

    def __init__(self, world: FakeWorld) -> None:
        self._world = world
        self._events = [AllocatorEvent(-2 - index, nbytes) for index, nbytes in enumerate(LIBRARY_WORKSPACES_BYTES)]

    def allocated(self, key: int, nbytes: int) -> None:
        self._events.append(AllocatorEvent(key, nbytes, self._world.stream.number))

    def reserved(self) -> dict[str, int]:
        return {
            name: simulate(self._events, expandable_segments=is_on).peak_reserved_bytes
            for name, is_on in ((EXPANDABLE, True), (FIXED, False))
        }

    def least(self) -> int:
        return least_capacity(self._events, expandable_segments=True)


class FakeTraining:
    """The engine and the batches of a dry run; with a device, or outside the fake mode, of a real run like it."""

    def __init__(self, run: RunSpec, plan: Plan, *, device: torch.device = CPU) -> None:
        self.run, self.plan, self.device = run, plan, device
        self.config = build_config(run.model, vocab_size=_vocab_size(run))
        self.skeleton = run_skeleton(run, self.config)
        self._teacher = teacher_skeleton(run, plan)
        self.num_parameters = sum(parameter.numel() for parameter in self.skeleton.parameters())

    def build(self) -> None:
        run, plan = self.run, self.plan
        self.engine = Engine(
            self.skeleton,
            plan,
            optimizer=OptimizerPolicy.of(run.train),
            objective=self._objective(),
            seed=run.train.seed,
            clip_norm=run.train.clip_norm,
            frozen=run.train.frozen,
            router=run.router,
            weights=_FakeWeights(self.skeleton, describe(self.skeleton)),
            device=self.device,
        )
        self._rows = run.train.global_batch * run.objective.rows_per_sample // plan.mesh.dp_degree

    def _objective(self) -> Objective | None:
        if self._teacher is None:
            return objective_of(self.run.objective)
        return Distillation(self.run.objective, allocated(self._teacher, device=self.device))

    def expect_messages(self) -> None:
        """Register the shapes of received activations: the messages that announce them have no values here."""
        pipeline, tensor = PipelineRuntime.of(self.engine), self.plan.tensor_parallel
        if pipeline is None:
            return
        runner = pipeline.schedule_runner
        rows = self._rows // self.plan.pipeline.microbatches
        length = self.run.data.sequence_length
        shards = self.plan.mesh.tp if tensor.sequence_parallel else 1
        shape = (rows, length // shards, self.config.get_text_config().hidden_size)
        dtype = torch_dtype(self.plan.precision.policy().weights)
        for place in runner.stages.own:
            runner.known_shapes.expect(place, (rows, length), shape=shape, dtype=dtype)

    def step(self) -> None:
        self.engine.step_nowait(self._batch())

    def evaluate(self) -> None:
        self.engine.evaluate_nowait(self._batch())

    def _batch(self) -> dict[str, torch.Tensor]:
        """A new batch per step, freed with it, as in training."""
        ids = torch.zeros((self._rows, self.run.data.sequence_length), dtype=torch.int64)
        column = {REFERENCE: torch.zeros(self._rows, dtype=torch.float64)} if self.run.objective.has_reference else {}
        return {"input_ids": ids, "labels": ids.clone(), **column}


def _with_library(peak: PeakRecord) -> PeakRecord:
    extra = sum(LIBRARY_WORKSPACES_BYTES)
    terms = {**peak.terms, str(Term.TEMPORARIES): peak.terms.get(str(Term.TEMPORARIES), 0) + extra}
    ordered = dict(sorted(terms.items(), key=lambda item: -item[1]))
    return replace(peak, peak_bytes=peak.peak_bytes + extra, terms=ordered)


def _notes(stage: FakeTraining) -> tuple[str, ...]:
    notes = []
    if stage.plan.data_parallel.zero == 0 and stage.plan.mesh.dp_degree > 1:
        notes.append("DDP's reducer is modelled: buckets and all-reduces are counted, its internals are not")
    if stage.run.data.isolates:
        notes.append("documents are not isolated in a dry run: attention masks of packed rows are not counted")
    return tuple(notes)


def _routing_notes(plan: Plan, imbalance: float) -> tuple[str, ...]:
    if plan.mesh.ep == 1:
        return ()
    return (f"the rank's experts get {imbalance:g} x the tokens of an even router (--imbalance)",)


class _FakeWeights:
    """Weights with shapes and without values, one full unit at a time."""

    def __init__(self, skeleton: torch.nn.Module, layout: ModelLayout) -> None:
        self._layout = layout
        self._like = {name: (parameter.shape, parameter.dtype) for name, parameter in skeleton.named_parameters()}

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Callable[[tuple[slice, ...]], torch.Tensor]]]:
        for unit in self._layout.units:
            mine = [name for name in names if self._layout.unit_of[name] == unit]
            made = [torch.empty(shape, dtype=dtype) for shape, dtype in map(self._like.__getitem__, mine)]
            for name, tensor in zip(mine, made, strict=True):
                yield name, tensor.__getitem__


def _vocab_size(run: RunSpec) -> int:
    """The tokenizer's size, for the check that its ids fit; the config gives the size of the model's table."""
    if run.tokenizer == vocabulary.BYTES:
        return vocabulary.BYTE_VOCABULARY
    from weft.data.tokenizers import find_tokenizer, open_tokenizer

    if run.tokenizer.partition("@")[0] != run.model.path:
        return open_tokenizer(run.tokenizer).vocab_size
    # Nothing is tokenised here: a folder with only a config is enough, and no tokenizer is downloaded.
    own = find_tokenizer(run.tokenizer) if Path(run.tokenizer).expanduser().is_dir() else None
    return own.vocab_size if own is not None else 1
