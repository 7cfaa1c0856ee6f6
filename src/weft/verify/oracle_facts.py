"""Inputs of the oracle: the run's own config, weights, rates, rows and run folder, as plain values.

This module imports weft and judges nothing. Everything is read again for every plan, so that the oracle judges the code
as it is at that moment (tests patch it).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import weft.train.rate
from weft.checkpoint import read_tensors
from weft.checkpoint.layout import step_path
from weft.core.data_spec import DataSpec
from weft.core.plan import Plan
from weft.core.precision import PrecisionPolicy
from weft.core.run_spec import RunSpec
from weft.data import open_corpus
from weft.data.split import Split
from weft.data.words import counted_of, tokens_of
from weft.engine.state import MODEL, OPTIMIZER
from weft.models.adapter.build import initial_weights
from weft.models.adapter.lora import factor_names
from weft.models.layout import describe
from weft.models.pretrained import PretrainedWeights
from weft.train.build import base_weights
from weft.train.folder.run_folder import RunFolder
from weft.verify.exercise import CPU, Subject, plan_precision, plan_split, resting_low
from weft.verify.oracle import CorpusFacts, LoopFacts, MixtureFacts, RankShare, RunFacts, Saved, SourceFacts
from weft.verify.references import References
from weft.zoo.hub import model_folder

KEPT, SMALL = 8, 5_000_000  # cached checkpoints of models below SMALL elements; larger ones are cached one at a time


def collect_facts(run: RunSpec, loop_run: RunSpec, plan: Plan, folder: Path, export: Path, references: References,
                  subject: Subject) -> RunFacts:  # fmt: skip
    """Collect on rank 0, which has the folder and the references. `subject` is the loop's."""
    names = list(describe(subject.skeleton()).unit_of)
    source: Any = initial_weights(subject.run, subject.config, device=subject.device)
    initial = {name: read(()).to(CPU, copy=True) for name, read in source.readers(names)}
    tables = run.model_dump(mode="json")
    if run.objective.teacher is not None:
        tables["objective"]["teacher"] = str(model_folder(run.objective.teacher, weights=True))
    return RunFacts(
        run=tables,
        loop_run=loop_run.model_dump(mode="json"),
        config=subject.config,
        initial=initial,
        pretrained=_pretrained(run, subject),
        without_rule=frozenset(source.by_rule),
        rate=lambda step: weft.train.rate.learning_rate_at(run.train, step),
        corpus=_corpus(subject),
        dp_degree=plan.mesh.dp_degree,
        loop=_loop(loop_run, plan, folder, export, references, subject),
    )


def _pretrained(run: RunSpec, subject: Subject) -> dict[str, torch.Tensor] | None:
    """Weights of the run's model folder, as training reads them. None for a shrunk run, which starts at random."""
    if run.model.path is None or run.model.weights == "random":
        return None
    source, _ = base_weights(run, subject.config, device=CPU)
    if not isinstance(source, PretrainedWeights):
        return None
    factors = set(factor_names(skeleton := subject.skeleton()))
    names = [name for name, _ in skeleton.named_parameters() if name not in factors]
    return {name: read(()).to(CPU, copy=True) for name, read in source.readers(names)}


def _corpus(subject: Subject) -> CorpusFacts | MixtureFacts:
    corpus, data = subject.corpus, subject.run.data
    training, held_out = corpus.training, corpus.evaluation
    if isinstance(training, Split):
        return _one_corpus(subject, training, held_out if isinstance(held_out, Split) else None)
    return MixtureFacts(
        sources=[
            SourceFacts(
                data=part.model_dump(mode="json"), weight=source.weight, corpus=_one_corpus(*_alone(subject, part))
            )
            for part, source in zip(data.parts, data.sources, strict=True)
        ],
        by_tokens=data.weigh_by == "tokens",
        vocab_size=corpus.vocab_size,
        end_of_document=corpus.end_of_document,
        training=_rows(subject, is_held_out=False),
        held_out=None if held_out is None else _rows(subject, is_held_out=True),
    )


def _alone(subject: Subject, data: DataSpec) -> tuple[Subject, Split, Split | None]:
    """The run on one source, and the splits of that."""
    run = subject.run.model_copy(update={"data": data})
    corpus = open_corpus(data)
    training, held_out = (split if isinstance(split, Split) else None for split in (corpus.training, corpus.evaluation))
    if training is None:
        raise TypeError("a source of a mixture is a mixture")
    return replace(subject, run=run, corpus=corpus), training, held_out


def _one_corpus(subject: Subject, training: Split, held_out: Split | None) -> CorpusFacts:
    corpus, words = subject.corpus, training.tokens
    has_mask, is_stream = training.has_mask, subject.run.data.row_packing == "concatenate"
    return CorpusFacts(
        tokens=tokens_of(words, words.dtype) if has_mask else words,
        counted=counted_of(words, words.dtype) if has_mask else None if is_stream else np.ones(len(words), dtype=bool),
        vocab_size=corpus.vocab_size,
        end_of_document=corpus.end_of_document,
        training=_share(subject, training, is_held_out=False),
        held_out=None if held_out is None else _share(subject, held_out, is_held_out=True),
    )


def _share(subject: Subject, split: Split, *, is_held_out: bool) -> RankShare:
    lengths = np.diff(split.stream_starts)
    ranges = [(int(start), int(start + length)) for start, length in zip(split.run_starts, lengths, strict=True)]
    if subject.run.data.row_packing == "concatenate":
        num_rows = split.num_rows(subject.run.data.sequence_length)
        return _rows(subject, is_held_out=is_held_out, ranges=ranges, num_rows=num_rows)
    documents = [(int(begin), int(end)) for begin, end in split.bounds]
    return _rows(subject, is_held_out=is_held_out, ranges=ranges, documents=documents)


def _rows(subject: Subject, *, is_held_out: bool, num_rows: int | None = None, **tokens: Any) -> RankShare:
    """The rows of a share, as each rank reads them; the loader counts them if they are not given."""
    loader = functools.cache(
        lambda rank, degree: subject.loader(evaluation=is_held_out, dp_rank=rank, dp_degree=degree)
    )

    def batch(position: int, *, dp_rank: int, dp_degree: int) -> dict[str, NDArray[Any]]:
        return {key: value.numpy() for key, value in loader(dp_rank, dp_degree).batch(position).items()}

    counted = loader(0, 1).num_rows if num_rows is None else num_rows
    return RankShare(num_rows=counted, batch=batch, **tokens)


def _loop(run: RunSpec, plan: Plan, folder: Path, export: Path, references: References, subject: Subject) -> LoopFacts:
    records = RunFolder(folder).metrics.read()
    truth, same, allowance = references.truth, references.same, references.allowance
    precision, policy = plan_precision(plan, run.train), plan.precision.policy()
    saved = [step for step in range(1, run.train.steps + 1) if step_path(folder / "checkpoints", step).is_dir()]
    is_small = sum(value.numel() for value in truth.initial.values()) < SMALL
    compute = str(precision.compute).removeprefix("torch.")
    return LoopFacts(
        losses=[record.loss for record in records],
        norms=[record.grad_norm for record in records],
        rates=[record.learning_rate for record in records],
        held_out_losses={record.step: record.eval_loss for record in records if record.eval_loss is not None},
        skipped=frozenset(index for index, record in enumerate(records) if record.skipped),
        saved_steps=saved,
        saved=functools.lru_cache(maxsize=KEPT if is_small else 1)(functools.partial(_saved, folder)),
        export=export,
        truth_losses=truth.losses,
        same_losses=same.losses,
        truth_norms=truth.norms,
        same_norms=same.norms,
        least_losses=allowance.losses,
        least_norms=allowance.norms,
        compute=compute,
        coarsest="float8_e4m3fn" if precision.has_float8 else compute,
        starts_rounded=precision.rounds_weights,
        at_rest={name: truth.initial[name] for name in resting_low(subject)},
        has_coded_sums=precision.has_codes,
        rounded_states=_why_rounded(run, policy),
        is_delayed=plan.has_delayed_updates,
        chunk_rows=plan_split(plan, run).chunk_rows,
    )


def _why_rounded(run: RunSpec, policy: PrecisionPolicy) -> str:
    if run.train.optimizer == "adamw8bit":
        return "moments are stored in 8 bits"
    if run.train.optimizer == "adafactor":
        return "means of rows and columns do not show the gradients"
    if policy.has_low_states:
        moments = f"{policy.first_moment} and {policy.second_moment}"
        return f"moments are stored in {moments}, weights in {policy.master_weights}: 'rounded updates' checks them"
    return ""


def _saved(folder: Path, step: int) -> Saved:
    tensors = dict(read_tensors(step_path(folder / "checkpoints", step)))

    def part(prefix: str) -> dict[str, Any]:
        return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

    return Saved(weights=part(MODEL), states=part(OPTIMIZER))
