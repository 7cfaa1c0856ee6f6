"""The exercise that a plan is judged by: global batches with the cases of `borders`, learning rates, initial values.

The reference reads global batches, the plan's own loader reads each rank's rows; the two must agree, which is checked.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec, TrainSpec
from weft.data import Corpus, Loader, open_corpus
from weft.data.mixture import Mixture
from weft.data.rows import RowLayout
from weft.models.adapter.build import initial_weights, run_skeleton
from weft.models.adapter.lora import rests_low
from weft.models.adapter.quantised import quantised_linears
from weft.models.adapter.targets import is_router
from weft.models.build import build_config
from weft.models.layout import describe
from weft.models.matrices import matrix_names
from weft.models.scalar_head import has_scalar_head
from weft.train.rate import learning_rate_at
from weft.verify.borders import Borders
from weft.verify.low_update import FIRST, SECOND
from weft.verify.run_trace import BatchSplit, Exercise, ReferencePrecision, Tensors

CPU = torch.device("cpu")
# Small enough that no gradient of a fresh model overflows float16: a skipped step would prove nothing.
LOSS_SCALE = 2.0**10


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The run under verification: its corpus, its model and the device of both sides.

    The device is part of the run: a GPU draws other initial values and dropout masks than a CPU.
    """

    run: RunSpec
    corpus: Corpus
    config: Any
    device: torch.device = CPU
    num_ranks: int = 1

    @staticmethod
    def open(run: RunSpec, *, device: torch.device = CPU, num_ranks: int = 1) -> Subject:
        corpus = open_corpus(run.data)
        config = build_config(run.model, vocab_size=corpus.vocab_size, end_of_document=corpus.end_of_document)
        return Subject(run=run, corpus=corpus, config=config, device=device, num_ranks=num_ranks)

    @functools.cached_property
    def borders(self) -> Borders:
        """The planted cases, the same for every plan of `num_ranks`."""
        data, training = self.run.data, self.corpus.training
        splits = [one.split for one in training.sources] if isinstance(training, Mixture) else [training]
        return Borders(
            vocab_size=_vocab_size(self.skeleton(), self.corpus.vocab_size, has_scores=has_scalar_head(self.config)),
            num_ranks=self.num_ranks,
            rows=self.run.train.global_batch * self.run.objective.rows_per_sample,
            length=data.sequence_length,
            is_paired=self.run.objective.is_of_pairs,
            end_of_document=self.corpus.end_of_document if any(part.isolate_documents for part in data.parts) else None,
            has_gaps=any(part.row_packing != "concatenate" for part in data.parts)
            or any(split.has_mask for split in splits),
        )

    def skeleton(self) -> nn.Module:
        return run_skeleton(self.run, self.config)

    @functools.cached_property
    def matrices(self) -> frozenset[str]:
        """The parameters that muon takes for matrices of blocks."""
        skeleton = self.skeleton()
        return matrix_names(skeleton, describe(skeleton))

    def build(self) -> nn.Module:
        """A plain model with allocated memory; the caller fills in the values."""
        skeleton = run_skeleton(self.run, copy.deepcopy(self.config))  # building may change it
        buffers = {name: buffer.clone() for name, buffer in skeleton.named_buffers()}
        model = skeleton.to_empty(device=self.device)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        model.tie_weights()  # type: ignore[operator]
        return model.train()

    def initial(self) -> Tensors:
        names = list(describe(self.skeleton()).unit_of)
        source = initial_weights(self.run, self.config, device=self.device)
        return {name: read(()).to(CPU, copy=True) for name, read in source.readers(names)}

    def loader(self, *, evaluation: bool = False, dp_rank: int = 0, dp_degree: int = 1) -> Loader:
        split = self.corpus.evaluation if evaluation else self.corpus.training
        if split is None:
            split = self.corpus.training
        return Loader(
            split,
            seed=self.run.train.seed,
            global_batch=self.run.train.global_batch,
            layout=RowLayout.of(self.run.data),
            dp_rank=dp_rank,
            dp_degree=dp_degree,
            epochs=1 if evaluation else self.run.data.epochs,
            shuffle=not evaluation,
            balances=not evaluation and self.run.data.balances,
        )


def global_exercise(subject: Subject, *, rates: Sequence[float], clip_norm: float) -> Exercise:
    """The exercise with global batches, for one process."""
    return Exercise(
        initial=subject.initial(),
        frozen=_frozen(subject),
        rests_low=resting_low(subject),
        objective=subject.run.objective,
        batches=training_batches(subject, steps=len(rates)),
        rates=rates,
        evaluation=evaluation_batches(subject),
        train=subject.run.train,
        clip_norm=clip_norm,
        router=subject.run.router,
        matrices=subject.matrices,
    )


def loop_exercise(
    subject: Subject,
    *,
    steps: int,
    skipped: frozenset[int],
    undelayed: frozenset[int] = frozenset(),
    evaluation: Sequence[Tensors] = (),
) -> Exercise:
    """The exercise of the training loop: its own batches, rates, clipping and checkpoints."""
    loader, rows, train = subject.loader(), subject.run.train.global_batch, subject.run.train
    every = subject.run.checkpoint.every
    return Exercise(
        initial=subject.initial(),
        frozen=_frozen(subject),
        rests_low=resting_low(subject),
        objective=subject.run.objective,
        batches=[loader.batch(step * rows) for step in range(steps)],
        rates=[learning_rate_at(train, step + 1) for step in range(steps)],
        evaluation=evaluation,
        train=train,
        clip_norm=train.clip_norm,
        router=subject.run.router,
        matrices=subject.matrices,
        skipped=skipped,
        restarts=undelayed | {step for step in range(steps) if every > 0 and (step + 1) % every == 0},
        undelayed=undelayed,
    )


def training_batches(
    subject: Subject, *, steps: int, dp_rank: int = 0, dp_degree: int = 1
) -> list[dict[str, torch.Tensor]]:
    """This rank's rows of every step."""
    loader = subject.loader(dp_rank=dp_rank, dp_degree=dp_degree)
    samples = subject.run.train.global_batch
    first_row = dp_rank * (subject.borders.rows // dp_degree)
    return [
        planted.into(loader.batch(step * samples), first_row=first_row)
        for step, planted in enumerate(subject.borders.training(steps=steps))
    ]


def evaluation_batches(subject: Subject, *, dp_rank: int = 0, dp_degree: int = 1) -> list[dict[str, torch.Tensor]]:
    """Held-out batches, at least two, that cover every vocabulary row; the second has an empty tail."""
    loader = subject.loader(evaluation=True, dp_rank=dp_rank, dp_degree=dp_degree)
    first_row = dp_rank * (subject.borders.rows // dp_degree)
    positions = [at for at in (0, subject.run.train.global_batch) if loader.has_batch(at)]
    return [
        planted.into(loader.batch(at), first_row=first_row)
        for at, planted in zip(itertools.cycle(positions), subject.borders.evaluation(), strict=False)
    ]


def _vocab_size(model: Any, known: int, *, has_scores: bool) -> int:
    """Rows that both the embedding and the head have; `known` if the model has neither. Heads of scores have none."""
    ends = [model.get_input_embeddings(), *([] if has_scores else [model.get_output_embeddings()])]
    sizes = [int(end.weight.shape[0]) for end in ends if getattr(end, "weight", None) is not None]
    return min(sizes, default=known)


def plan_precision(plan: Plan, train: TrainSpec) -> ReferencePrecision:
    """The plan's own precision for one process."""
    policy = plan.precision.policy()
    scale = LOSS_SCALE if policy.loss_scaling else 1.0
    is_master_free = policy.master_weights == "bfloat16"
    return ReferencePrecision(
        compute=getattr(torch, policy.weights),
        master=torch.float32 if is_master_free else getattr(torch, policy.master_weights),
        loss_scale=scale,
        has_8bit_moments=train.optimizer == "adamw8bit",
        float8=plan.float8.linears,
        recipe=plan.float8.recipe,
        amax_history=plan.float8.amax_history if plan.float8.recipe == "delayed" else 0,
        amax_margin=plan.float8.margin if plan.float8.recipe == "delayed" else 0,
        has_float8_experts=plan.float8.experts == "all",
        measure_every=plan.float8.measure_every if plan.float8.fallback_error else 0,
        fallback_error=plan.float8.fallback_error,
        has_float8_wire=plan.mesh.ep > 1 and plan.expert_parallel.wire == "float8",
        divides_last=plan.kernels.loss == "fused",
        has_wide_router=policy.has_wide_router,
        has_wide_logits=policy.has_wide_logits,
        has_wide_residual=policy.has_wide_residual,
        rounds_moments=frozenset(
            state
            for state, dtype in ((FIRST, policy.first_moment), (SECOND, policy.second_moment))
            if dtype == "bfloat16"
        ),
        rounds_weights=is_master_free,
        rounds_gradients=policy.gradients == "bfloat16",
        **_coded_sums(plan),
    )


def _coded_sums(plan: Plan) -> dict[str, Any]:
    """How weights and gradients are rounded on their way: which micro-batches are summed before, whether sums are."""
    dp, mesh, policy = plan.data_parallel, plan.mesh, plan.precision.policy()
    # context-parallel ranks hold shards, or replicas, as data-parallel ones do
    shards, replicas = (mesh.dp_shard * mesh.cp, mesh.dp_replicate) if dp.zero else (1, mesh.dp_degree * mesh.cp)
    gather = {"gather": plan.coded_gather} if shards > 1 else {}
    if shards * replicas == 1 or not policy.has_coded_sums:
        return gather
    each = dp.zero >= 2 and shards > 1
    return {
        **gather,
        "reduce": policy.reduce,
        "feeds_back": dp.error_feedback,
        "chunks_per_sum": 1 if each else plan.pipeline.microbatches,
        "rounds_sums": replicas > 1,
    }


def at_rest(exercise: Exercise, precision: ReferencePrecision) -> Exercise:
    """The exercise with the initial values as the plan stores them, so that the truth starts from the same."""
    if not precision.rounds_weights:
        low = {name: exercise.initial[name].to(precision.compute).float() for name in exercise.rests_low}
        return replace(exercise, initial={**exercise.initial, **low})
    return replace(exercise, initial={name: value.bfloat16() for name, value in exercise.initial.items()})


def plan_split(plan: Plan, run: RunSpec) -> BatchSplit:
    """The rows of one micro-batch of one rank."""
    samples = max(1, run.train.global_batch // (plan.mesh.dp_degree * plan.pipeline.microbatches))
    return BatchSplit(chunk_rows=samples * run.objective.rows_per_sample, unties=plan.mesh.pp > 1)


def joint_split(plan: Plan, run: RunSpec) -> BatchSplit:
    """The rows of one micro-batch of all ranks: the input of a forward that changes buffers."""
    samples = max(1, run.train.global_batch // plan.pipeline.microbatches)
    rows = samples * run.objective.rows_per_sample
    return BatchSplit(chunk_rows=rows, ranks=plan.mesh.dp_degree, unties=plan.mesh.pp > 1)


def _frozen(subject: Subject) -> frozenset[str]:
    """Parameters that the run freezes, or the model itself: biases of routers are often parameters of that kind."""
    parameters, patterns = subject.skeleton().named_parameters(), subject.run.train.frozen
    return frozenset(
        name
        for name, parameter in parameters
        if not parameter.requires_grad or any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def resting_low(subject: Subject) -> frozenset[str]:
    """Frozen parameters that rest in the compute dtype: all of a low base but its codes and weights of routers."""
    skeleton = subject.skeleton()
    if not rests_low(skeleton):
        return frozenset()
    in_codes = {f"{name}.weight" for name, _ in quantised_linears(skeleton)}
    return frozenset(name for name in _frozen(subject) if name not in in_codes and not is_router(name))
