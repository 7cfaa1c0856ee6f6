"""Build the engine and the data of a run under a plan, in this order:

corpus (tokenised by `prepare_data`, before ranks join) -> config -> skeleton on meta -> engine -> loaders
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.core.errors import BadValueError, DataError
from weft.core.parameter_groups import require_matches
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec, RunSpec
from weft.core.state_folder import StateFolder
from weft.core.vocabulary import padded
from weft.data import Corpus, Loader, find_tokenizer, open_corpus, open_tokenizer
from weft.data.rows import RowLayout
from weft.data.streaming import StreamingLoader
from weft.engine.distillation import Distillation
from weft.engine.engine import Engine
from weft.engine.objective import Objective
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.preference import objective_of
from weft.models.adapter.build import drawing_device, run_skeleton, with_adapter
from weft.models.adapter.targets import notes_on_experts
from weft.models.build import build_config, build_skeleton
from weft.models.drawn_head import WithDrawnHead
from weft.models.hf_config import unread_keys
from weft.models.initial import InitialWeights, WeightSource
from weft.models.layout import describe
from weft.models.positions import note_on_positions
from weft.models.pretrained import PretrainedWeights
from weft.models.scalar_head import has_scalar_head, head_name
from weft.models.weight_files import digest_of
from weft.plan.legality import require_legal
from weft.train.best import why_not_watched
from weft.train.evaluation_sets import EvaluationSet, open_sets, prepare_sets
from weft.train.held_out import why_no_evaluation
from weft.train.isolation import require_isolation
from weft.train.loggers.tokenising import TokenisingDisplay
from weft.train.out_of_memory import OutOfMemoryScene
from weft.train.parts import OwnRows, TrainParts
from weft.train.ranks.process import Process, phase
from weft.train.teacher import open_teacher
from weft.zoo.hub import model_folder, reads_weights


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """Everything a training loop needs."""

    engine: Engine
    training: Loader | StreamingLoader | OwnRows
    evaluation: dict[str, EvaluationSet]  # by name
    model_config: Any
    notes: tuple[str, ...]
    no_evaluation: str = ""  # why held-out loss is missing although it is not switched off
    base_digest: str | None = None  # of the files under an adapter, whose weights no checkpoint has

    @property
    def contents(self) -> dict[str, int]:
        """Document and token counts, by which a resume recognises the data: file names do not identify it."""
        if isinstance(self.training, OwnRows):
            return {"documents": self.training.num_rows, "tokens": 0}
        split = self.training.split
        return {"documents": split.num_documents, "tokens": split.num_tokens}


def build_workbench(
    run: RunSpec,
    plan: Plan,
    process: Process,
    *,
    device: torch.device,
    scene: OutOfMemoryScene | None = None,
    state_folder: StateFolder | None = None,
    corpus: Corpus | None = None,
    parts: TrainParts | None = None,
) -> Workbench:
    """The engine and the loaders of `run` under `plan`, on every rank; `scene` records config and engine when built.
    `corpus`: the run's, from `prepare_data`. `parts`: what a caller gives beside the run."""
    parts = parts or TrainParts()
    require_legal(plan, run, has_own_model=parts.model is not None)
    with phase("opening the data", is_slow=True):
        corpus = corpus or (open_corpus(run.data) if parts.data is None else None)
        missing = why_no_evaluation(run, corpus) if corpus is not None else ""
        vocabulary = corpus or open_tokenizer(run.tokenizer)
    with phase("building the model", is_slow=True):
        skeleton, config = _model_of(run, parts, vocabulary)
        if scene is not None:
            scene.config = config
        require_isolation(run.data, skeleton)
        require_matches(run.train.groups, [name for name, _ in skeleton.named_parameters()])
        weights, weight_notes = (None, []) if parts.model else weight_source(run, config, device=device)
        engine = Engine(
            skeleton,
            plan,
            optimizer=parts.optimizer or OptimizerPolicy.of(run.train),
            objective=_objective(run, parts, plan, config, device=device),
            seed=run.train.seed,
            clip_norm=run.train.clip_norm,
            frozen=run.train.frozen,
            router=run.router,
            weights=weights,
            device=device,
            state_folder=state_folder,
        )
    if scene is not None:
        scene.engine = engine
    training, evaluation = _loaders(run, engine, corpus, parts, missing=missing)
    if reason := why_not_watched(run, evaluation):
        raise DataError(reason, hint="name another set, or raise data.eval_fraction")
    by_rule = getattr(weights, "by_rule", [])
    weight_notes += [missing] if missing else []
    weight_notes += (
        tokenizer_notes(run, config, vocab_size=corpus.vocab_size) if corpus is not None and parts.model is None else []
    )
    if by_rule:
        weight_notes.append(f"the model's code does not initialise {len(by_rule)} parameters, such as {by_rule[0]}")
    return Workbench(
        engine=engine,
        training=training,
        evaluation=evaluation,
        model_config=config,
        notes=(*engine.notes, *weight_notes),
        no_evaluation=missing,
        base_digest=digest_of_base(run),
    )


def _objective(run: RunSpec, parts: TrainParts, plan: Plan, config: Any, *, device: torch.device) -> Objective | None:
    """The caller's objective, or that of [objective]; None for the loss of the next token."""
    if parts.objective is not None and run.objective.kind != "next_token":
        raise BadValueError(
            f"weft.train(objective=) is given beside objective.kind = {run.objective.kind!r}",
            hint="leave one of them out",
        )
    return parts.objective or run_objective(run, plan, config, device=device)


def run_objective(run: RunSpec, plan: Plan, config: Any, *, device: torch.device) -> Objective | None:
    """The objective of [objective]; None for the loss of the next token."""
    if run.objective.kind == "distillation":
        return Distillation(run.objective, open_teacher(run, plan, config, device=device))
    return objective_of(run.objective)


def prepare_data(run: RunSpec, process: Process, *, is_speaking: bool) -> Corpus:
    """Build the run's token caches if they are missing: one process builds, the others wait for its file."""
    progress = TokenisingDisplay(is_speaking=is_speaking, is_main=process.is_main)
    prepare_sets(run, progress)
    return open_corpus(run.data, progress=progress)


def weight_source(run: RunSpec, config: Any, *, device: torch.device) -> tuple[WeightSource, list[str]]:
    """The values of the model's files, or random ones without a path or if asked for; and notes."""
    base, notes = base_weights(run, config, device=device)
    if run.adapter.is_on:
        notes += notes_on_experts(build_skeleton(config, attention=run.model.attention))
    return with_adapter(base, run, config), notes


def digest_of_base(run: RunSpec) -> str | None:
    """The digest of the files that an adapter's base is read from; None without an adapter or without files."""
    if not run.adapter.is_on or not reads_weights(run.model):
        return None
    return digest_of(model_folder(str(run.model.path), revision=run.model.revision, weights=True))


def base_weights(run: RunSpec, config: Any, *, device: torch.device) -> tuple[WeightSource, list[str]]:
    """As `weight_source`, of the model without adapters."""
    skeleton = build_skeleton(config, attention=run.model.attention)
    notes = [*_config_notes(run.model, config), *filter(None, [note_on_positions(run, config)])]
    drawn = InitialWeights(skeleton, describe(skeleton), seed=run.train.seed, device=drawing_device(run, device))
    if not reads_weights(run.model):
        return drawn, notes
    folder = model_folder(str(run.model.path), revision=run.model.revision, weights=True)
    notes = [f"weights were read from {folder}", *notes]
    if not has_scalar_head(config):
        return PretrainedWeights(folder, skeleton), notes
    spec = run.model.model_copy(update={"head": "tokens"})
    stored = build_skeleton(build_config(spec, vocab_size=1), attention=run.model.attention)
    return WithDrawnHead(PretrainedWeights(folder, stored), drawn, head_name(skeleton)), notes


def tokenizer_notes(run: RunSpec, config: Any, *, vocab_size: int) -> list[str]:
    """A warning if pretrained weights get token ids that they were not trained with."""
    path, name = run.model.path, run.tokenizer
    if path is None or run.model.weights == "random" or name == run.model.own_tokenizer:
        return []
    own = find_tokenizer(str(run.model.own_tokenizer))
    if own is not None:
        if own.identity() == open_tokenizer(name).identity():
            return []
        return [
            f"data.tokenizer = {name!r} is not the tokenizer of {path}: its weights were trained with other token ids"
        ]
    table = getattr(config.get_text_config(), "vocab_size", vocab_size)
    if table in (vocab_size, padded(vocab_size)):
        return []
    return [f"data.tokenizer = {name!r} has {vocab_size} tokens, but the vocabulary of {path} has {table}"]


def _model_of(run: RunSpec, parts: TrainParts, vocabulary: Any) -> tuple[nn.Module, Any]:
    """The module and its config: the caller's, with values, or the run's on the meta device."""
    if parts.model is not None:
        module = parts.model()
        return module, getattr(module, "config", None)
    end = getattr(vocabulary, "end_of_document", None)
    config = build_config(run.model, vocab_size=vocabulary.vocab_size, end_of_document=end)
    return run_skeleton(run, config), config


def _loaders(
    run: RunSpec, engine: Engine, corpus: Corpus | None, parts: TrainParts, *, missing: str
) -> tuple[Loader | StreamingLoader | OwnRows, dict[str, EvaluationSet]]:
    share: dict[str, Any] = {
        "seed": run.train.seed,
        "global_batch": run.train.global_batch,
        "dp_rank": engine.topology.dp_rank,
        "dp_degree": engine.topology.dp_degree,
    }
    if corpus is None:
        return OwnRows(parts.data or (), epochs=run.data.epochs, **share), open_sets(run, None, share)
    if run.data.streaming:
        training: Loader | StreamingLoader = StreamingLoader(run.data, **share)
    else:
        rules: dict[str, Any] = {"layout": RowLayout.of(run.data), "balances": run.data.balances}
        training = Loader(corpus.training, epochs=run.data.epochs, **rules, **share)
    return training, open_sets(run, None if missing else corpus.evaluation, share)


def _config_notes(model: ModelSpec, config: Any) -> list[str]:
    return unread_keys(model_folder(model.path, revision=model.revision), config) if model.path is not None else []
