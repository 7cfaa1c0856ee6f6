"""Checks that run the training loop itself: resume on this and on another layout, export, oracle, finite data.

Every function is collective; the answers are rank 0's.
"""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.checkpoint import read_tensors
from weft.checkpoint.layout import step_path
from weft.core.data_spec import DataSpec
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.engine.state import MODEL, OPTIMIZER
from weft.models.scalar_head import SCORE, head_name
from weft.train.export import export_run
from weft.train.folder.run_folder import RunFolder
from weft.train.job import Job
from weft.train.ranks.process import Process
from weft.train.worker import run_job
from weft.verify.checks import check_same_bits, check_scalars, check_tensors
from weft.verify.exercise import Subject, loop_exercise
from weft.verify.finite_pairs import FinitePairs
from weft.verify.finite_text import EVAL_FRACTION, FiniteText
from weft.verify.layouts import other_layout, plan_name
from weft.verify.loop_comparison import against_references
from weft.verify.oracle import Oracle, Saved
from weft.verify.oracle.adapter import AdaptedPlainModel
from weft.verify.oracle.schedule_free import evaluated
from weft.verify.oracle_facts import collect_facts
from weft.verify.references import ReferenceCache, References
from weft.verify.run_trace import RunTrace
from weft.verify.verdict import Check, Finding, at_place

LOOSE_CLIP = 10.0  # above the norms of fresh models: gradients are not clipped


class WholeRuns:
    """Runs of a small training job, each in its own folder."""

    def __init__(
        self, run: RunSpec, process: Process, *, steps: int, scratch: Path, device: torch.device, cache: ReferenceCache
    ) -> None:
        self._run = run
        self._cache = cache
        self._process = process
        self._steps = steps
        self._scratch = scratch
        self._device = device
        self._num_folders = 0
        self._oracle = Oracle()

    def check_loop(self, plan: Plan, *, has_untrained: bool) -> list[Check]:
        """Train with a checkpoint in the middle; export; resume from the middle on the same and on another layout."""
        middle = max(1, self._steps // 2)
        is_sharded, is_delayed = plan.mesh.tp * plan.mesh.pp > 1, plan.has_delayed_updates
        run = self._loop_run(middle, is_delayed=is_delayed)
        often = self._loop_run(middle, is_delayed=False)  # a run resumes from the other layout's checkpoints, too
        folder = self._train(run, plan, self._new_folder())
        straight = self._trace_of(folder)
        references = self._references("loop", run, plan, folder, steps=self._steps)
        base = references.truth.initial if run.adapter.is_quantised else {}  # no checkpoint has what rests in codes
        checks = [
            self._against("training loop", references, straight, self._skipped(folder)),
            self._export(folder, {**base, **self._evaluated(straight)}),
        ]
        same, other = self._copy_up_to(folder, middle), self._copy_up_to(folder, middle)
        self._train(run, plan, same, resume=True)
        detail = f"saved at step {middle}, resumed to step {self._steps}: equal bits"
        checks.append(check_same_bits("resume", straight, self._trace_of(same), rule=5, detail=detail))
        elsewhere = other_layout(plan, global_batch=run.train.global_batch, has_untrained=has_untrained)
        self._train(often if is_sharded else run, elsewhere, other, resume=True)
        trace = self._trace_of(other)
        if is_delayed:
            undelayed = frozenset(range(middle, self._steps))
            checks.append(self._resumed("resume elsewhere", run, plan, folder, trace, undelayed=undelayed))
        else:
            checks.append(self._near(straight, trace, references, elsewhere, middle))
        if is_sharded and middle + 1 < self._steps:
            back = self._copy_up_to(other, middle + 1)
            self._train(run, plan, back, resume=True)  # full tensors there, sharded again here
            trace = self._trace_of(back)
            if is_delayed:
                undelayed = frozenset({middle})
                checks.append(self._resumed("resume back", run, plan, folder, trace, undelayed=undelayed))
            else:
                checks.append(self._near(straight, trace, references, plan, middle + 1, name="resume back"))
        return [*checks, *self._oracle_checks(run, plan, folder, references)]

    def check_oracle(self, plan: Plan) -> list[Check]:
        """Run the loop and its export for the oracle alone: no resume, no comparison with a reference."""
        run = self._loop_run(max(1, self._steps // 2), is_delayed=plan.has_delayed_updates)
        folder = self._train(run, plan, self._new_folder())
        references = self._references("loop", run, plan, folder, steps=self._steps)
        if self._process.is_main:
            export_run(folder, _export_of(folder))
        return self._oracle_checks(run, plan, folder, references)

    def _loop_run(self, middle: int, *, is_delayed: bool) -> RunSpec:
        """The loop's run: a learning rate that rises and falls, an evaluation at the end if rows are held out, and a
        checkpoint of every step for the oracle. A pipeline that never drains would drain for each: only one, in the
        middle."""
        return self._with(
            train={"warmup_steps": min(self._run.train.warmup_steps, self._steps // 2)},
            evaluation={"every": None},  # the default: too few held-out rows are then no error
            checkpoint={
                "every": middle if is_delayed else 1, "keep": self._steps + 1, "asynchronous": True, "at_end": True,
            },
        )  # fmt: skip

    def _oracle_checks(self, run: RunSpec, plan: Plan, folder: Path, references: References) -> list[Check]:
        """Check the code that plan and reference share against torch and transformers. Call after `_export`."""
        if not self._process.is_main:
            return []
        subject = Subject.open(run, device=self._device)
        facts = collect_facts(self._run, run, plan, folder, _export_of(folder), references, subject)
        return self._oracle.checks(facts)

    def _resumed(
        self, name: str, run: RunSpec, plan: Plan, folder: Path, found: RunTrace, *, undelayed: frozenset[int]
    ) -> Check:
        """Check a run of delayed updates that resumed without delays, on another layout, in the steps `undelayed`."""
        references = self._references("resumed", run, plan, folder, steps=self._steps, undelayed=undelayed)
        return self._against(name, references, found, frozenset())

    def check_finite_data(self, plan: Plan) -> list[Check]:
        """Check one epoch over a text that does not divide: every row once, all ranks end together, the partial batch
        is weighted by its tokens; and the loop's evaluations of held-out rows, which do not divide either."""
        make = FinitePairs if self._run.objective.is_of_pairs else FiniteText
        text = make(rows=self._run.train.global_batch, length=self._run.data.sequence_length)
        source = self._scratch / "finite"
        if self._process.is_main:
            text.write(source)
        self._barrier()
        run = self._with(
            data={
                **self._only(str(source)), "tokenizer": "bytes", "epochs": 1, "eval_fraction": EVAL_FRACTION,
                "packing": None, "truncation": None, "chat_template": None, "train_on": None,
                "isolate_documents": self._run.data.isolates, **text.data,
            },
            model=self._with_vocabulary(),
            train={"steps": 10, "clip_norm": LOOSE_CLIP if self._run.train.clip_norm > 0 else 0.0},
            checkpoint={"every": 0, "at_end": False},
            evaluation={"every": 1, "batches": 3},
        )  # fmt: skip
        folder = self._train(run, plan, self._new_folder())
        if not self._process.is_main:
            return []
        records = RunFolder(folder).metrics.read()
        expected = text.tokens
        found = [record.tokens for record in records]
        if found != expected:
            finding = Finding(rule=3, expected=f"tokens per step {expected}", found=str(found))
            return [Check.failed("finite data", finding)]
        trace = RunTrace(losses=[record.loss for record in records], norms=[record.grad_norm for record in records])
        references = self._references("finite", run, plan, folder, steps=len(expected), text=text)
        check = self._against("finite data", references, trace, self._skipped(folder))
        detail = f"{len(expected)} steps, the last with {expected[-1]} of {expected[0]} tokens"
        data = Check.passed("finite data", detail, margin=check.margin) if check.ok else check
        return [data, _check_evaluations(references, [record.eval_loss for record in records])]

    def _references(
        self,
        name: str,
        run: RunSpec,
        plan: Plan,
        folder: Path,
        *,
        steps: int,
        undelayed: frozenset[int] = frozenset(),
        text: FiniteText | FinitePairs | None = None,
    ) -> References:
        """One-process runs over the loop's batches and the held-out rows of `text`. Steps that float16 skipped are
        skipped there too."""
        if not self._process.is_main:
            return References()
        subject, skipped = Subject.open(run, device=self._device), self._skipped(folder)
        end, has_positions = subject.corpus.end_of_document, run.data.isolate_documents
        evaluation = text.evaluation(end_of_document=end, has_positions=has_positions) if text is not None else []
        return self._cache.references(
            f"{name} {sorted(skipped)} {sorted(undelayed)} {run.checkpoint.every}",
            subject,
            lambda: loop_exercise(subject, steps=steps, skipped=skipped, undelayed=undelayed, evaluation=evaluation),
            plan,
        )

    def _against(self, name: str, references: References, found: RunTrace, skipped: frozenset[int]) -> Check:
        """Check losses, norms and, if the run saved any, final weights against one process."""
        if not self._process.is_main:
            return Check.passed(name, "")
        saved = self._saved_of(references.truth.weights, found)
        return against_references(name, references, found, skipped, saved=saved.keys())

    def _near(
        self,
        straight: RunTrace,
        resumed: RunTrace,
        references: References,
        other: Plan,
        middle: int,
        *,
        name: str = "resume elsewhere",
    ) -> Check:
        """Check that another layout resumes within rounding of the uninterrupted run; the references give the bound."""
        place, margin = plan_name(other), 0.0
        truth, same = references.truth, references.same
        if len(resumed.losses) != len(straight.losses):
            finding = Finding(rule=5, expected=f"{len(straight.losses)} steps", found=f"{len(resumed.losses)} steps")
            return Check.failed(name, finding)
        may_overflow = other.precision.policy().loss_scaling  # without loss scaling a value that is not finite fails
        overflows = [
            (math.isfinite(a) or not may_overflow, math.isfinite(b) or not may_overflow)
            for a, b in zip(straight.norms, resumed.norms, strict=True)
        ]
        first_difference = next((step for step, (a, b) in enumerate(overflows) if a != b), len(overflows))
        taken = [step for step in range(first_difference) if overflows[step][0]]
        allowance = references.allowance
        for what, right, rounded, left, value, least in (
            ("loss", truth.losses, same.losses, straight.losses, resumed.losses, allowance.losses),
            ("norm", truth.norms, same.norms, straight.norms, resumed.norms, allowance.norms),
        ):
            near = [left[step] + abs(rounded[step] - right[step]) for step in taken]
            check = check_scalars(
                name, [left[step] for step in taken], near, [value[step] for step in taken],
                rule=5, steps=[step + 1 for step in taken], least=least,
            )  # fmt: skip
            if check.finding is not None:
                return Check.failed(name, at_place(check.finding, f"{what} under {place}"))
            margin = max(margin, check.margin)
        if first_difference < len(
            overflows
        ):  # float16 lowered its loss scale at another step: correct runs then differ
            detail = f"the same as {place} up to step {first_difference}, where float16 overflowed in one of the two"
            return Check.passed(name, detail, margin=margin)
        saved = self._saved_of(truth.weights, straight)
        near_weights = {key: straight.weights[key] + (same.weights[key] - truth.weights[key]) for key in saved}
        check, _ = check_tensors(
            name, {key: straight.weights[key] for key in near_weights}, near_weights,
            {key: value for key, value in resumed.weights.items() if key in near_weights},
            rule=5, dtype="float32", step=self._steps, initial=truth.initial, noise_share=allowance.update,
        )  # fmt: skip
        if check.finding is not None:
            return check
        detail = f"saved at step {middle}, resumed as {place}"
        return Check.passed(name, detail, margin=max(margin, check.margin))

    def _saved_of(self, weights: Mapping[str, torch.Tensor], found: RunTrace) -> dict[str, torch.Tensor]:
        """Those of `weights` that a checkpoint holds: all but a base in codes."""
        is_full = not self._run.adapter.is_quantised
        return {key: value for key, value in weights.items() if is_full or key in found.weights}

    def _evaluated(self, trace: RunTrace) -> Mapping[str, torch.Tensor]:
        """The final weights that are evaluated and exported."""
        return evaluated(Saved(weights=trace.weights, states=trace.optimizer), self._run.train.model_dump(mode="json"))

    def _skipped(self, folder: Path) -> frozenset[int]:
        records = RunFolder(folder).metrics.read() if self._process.is_main else []
        return frozenset(index for index, record in enumerate(records) if record.skipped)

    def _export(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> Check:
        if not self._process.is_main:
            return Check.passed("export", "")
        import transformers

        out, is_reward = _export_of(folder), self._run.objective.kind == "reward"
        export_run(folder, out)
        kind = "AutoModelForSequenceClassification" if is_reward else "AutoModelForCausalLM"
        loaded = getattr(transformers, kind).from_pretrained(str(out), dtype=torch.float32, trust_remote_code=False)
        if is_reward:
            head = head_name(Subject.open(self._run).skeleton())
            weights = {SCORE if name == head else name: value for name, value in weights.items()}
        named = dict(loaded.named_parameters())
        adapter = self._run.adapter
        plain = AdaptedPlainModel(loaded.config, adapter.model_dump()) if adapter.is_on else None
        for key, parameter in named.items():
            if key not in weights or _is_other(key, parameter.detach(), weights, plain):
                finding = Finding(rule=5, parameter=key, expected="the trained values", found="other values")
                return Check.failed("export", finding)
        return Check.passed("export", f"{len(named)} parameters reload with equal bits")

    def _with(self, **sections: dict[str, Any]) -> RunSpec:
        """The run with the verification's number of steps, without evaluation, with `sections` changed."""
        tables = self._run.model_dump(mode="json", exclude_none=True)
        tables["train"]["steps"] = self._steps
        tables["model"]["weights"] = "random"  # the reference draws its own; the oracle checks a model folder
        tables["evaluation"]["every"] = 0
        tables["logging"]["tensorboard"] = False
        tables["track"]["kind"] = []
        for section, values in sections.items():
            tables[section].update(values)
        return RunSpec.from_tables(tables)

    def _only(self, source: str) -> dict[str, Any]:
        """[data] with one source: a mixture of it alone if the run's data is a mixture."""
        is_mixed = bool(self._run.data.sources)
        return {"source": DataSpec().source if is_mixed else source, "sources": [{"source": source}] * is_mixed}

    def _with_vocabulary(self) -> dict[str, Any]:
        """[model] with the vocabulary of a teacher, which the tokenizer of other data would change."""
        if self._run.objective.teacher is None:
            return {}
        size = Subject.open(self._run).config.get_text_config().vocab_size
        return {"config": {**self._run.model.config, "vocab_size": size}}

    def _train(self, run: RunSpec, plan: Plan, folder: Path, *, resume: bool = False) -> Path:
        device: Any = self._device.type
        run_job(Job(run=run, plan=plan, device=device, out=folder.absolute(), resume=resume, quiet=True))
        self._barrier()
        gc.collect()  # frees the run's process groups and their threads, which are in a reference cycle
        return folder

    def _new_folder(self) -> Path:
        self._num_folders += 1
        return self._scratch / f"run-{self._num_folders}"

    def _copy_up_to(self, folder: Path, step: int) -> Path:
        """A copy of a run folder without the checkpoints after `step`."""
        copy = self._new_folder()
        if self._process.is_main:
            shutil.copytree(folder, copy)
            for later in range(step + 1, self._steps + 1):
                shutil.rmtree(step_path(copy / "checkpoints", later), ignore_errors=True)
        self._barrier()
        return copy

    def _trace_of(self, folder: Path) -> RunTrace:
        """Losses, norms and final tensors of a run folder; empty on ranks other than 0."""
        if not self._process.is_main:
            return RunTrace()
        records = RunFolder(folder).metrics.read()
        tensors = dict(read_tensors(step_path(folder / "checkpoints", self._steps)))
        return RunTrace(
            losses=[record.loss for record in records],
            norms=[record.grad_norm for record in records],
            weights={k.removeprefix(MODEL): v for k, v in tensors.items() if k.startswith(MODEL)},
            optimizer={k.removeprefix(OPTIMIZER): v for k, v in tensors.items() if k.startswith(OPTIMIZER)},
        )

    def _barrier(self) -> None:
        if self._process.world_size > 1:
            dist.barrier()


def _is_other(
    key: str, found: torch.Tensor, trained: Mapping[str, torch.Tensor], plain: AdaptedPlainModel | None
) -> bool:
    """Whether an exported parameter is not the trained one, with its adapter added if it has one."""
    if plain is not None:
        return plain.wrong_merge(key, found, trained)
    return not torch.equal(found, trained[key].float())


def _export_of(folder: Path) -> Path:
    return folder.with_name(folder.name + "-export")


def _check_evaluations(references: References, found: list[float | None]) -> Check:
    """Check the evaluations that the loop logged after its first and its last step against held-out rows made without
    a loader."""
    name, truth, same = "loop evaluation", references.truth.eval_losses, references.same.eval_losses
    values = [math.nan if value is None else value for value in (found[0], found[-1])]
    drifts = references.truth.eval_swings
    return check_scalars(name, truth, same, values, rule=1, drifts=drifts, least=references.evaluation_least)
