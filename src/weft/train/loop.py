"""The training loop: batches, steps, evaluations, checkpoints, and an orderly end in every case.

Data order is a function of (seed, samples seen), the learning rate of the step; so a resumed loop is the same loop.
Ranks agree on a stop (Ctrl-C, SIGTERM) in the all-reduce of the loss, then save a checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from weft.checkpoint import CheckpointStore
from weft.checkpoint.memory_copies import MemoryCopies
from weft.core.errors import NumbersError, SaveError
from weft.core.loop_spec import HELD_OUT
from weft.core.optimizers import is_averaged
from weft.core.records import EvalRecord, StepRecord
from weft.core.run_spec import RunSpec
from weft.core.terms import TimeTerm
from weft.engine.kernels.compiled import RecompileWatch, failures
from weft.engine.measure.timer import StepTimer
from weft.engine.pending import PendingStep
from weft.engine.step_guard import BadStep
from weft.train.allocator_gap import GapWatch, read_allocator
from weft.train.bad_steps import BadSteps
from weft.train.best import BestEvaluation
from weft.train.build import Workbench
from weft.train.due_steps import DueSteps
from weft.train.ledger.ledger import peak_memory_bytes
from weft.train.ledger.measuring import Measuring
from weft.train.loggers.display import Display, evaluation_line
from weft.train.loggers.metrics import MetricsWriter
from weft.train.loop_outcome import STEP_TERMS, LoopOutcome, checkpoint_row
from weft.train.parts import StepCallback
from weft.train.ranks.pace import slow_rank
from weft.train.ranks.process import StopFlag, paces, phase
from weft.train.rate import learning_rate_at
from weft.train.step_profiler import StepProfiler
from weft.train.text_samples import TextSampler


class TrainingLoop:
    """One run from the engine's current step to its last."""

    def __init__(
        self,
        run: RunSpec,
        bench: Workbench,
        store: CheckpointStore,
        *,
        metrics: MetricsWriter,
        display: Display,
        stop: StopFlag,
        measuring: Measuring | None = None,
        samples: int = 0,
        copies: MemoryCopies | None = None,
        is_saved: bool = True,
        callbacks: Sequence[StepCallback] = (),
        watched: Mapping[str, Any] | None = None,
        folder: Path,
        is_main: bool = True,
    ) -> None:
        """`is_saved`: the engine's state is on a disk too, or new. `watched`: of the resumed checkpoint. `folder`: of
        the run; rank 0 writes there, and profiled ranks their traces."""
        self._callbacks, self._is_stopping = callbacks, False  # all ranks hear of a stop with the next step
        self.run_spec, self._due = run, DueSteps(run)
        self.engine = bench.engine
        self.bench = bench
        self.store = store
        self.metrics = metrics
        self.display = display
        self.stop = stop
        self.measuring = measuring or Measuring(bench.engine, is_on=False)
        self.samples = samples  # of the global data order, consumed so far
        self.copies = copies
        self.outcome = LoopOutcome()
        self.best, self._is_best = BestEvaluation.of(run), False
        self.bad_steps = BadSteps(run, bench, folder if is_main else None)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._profiler = StepProfiler(run.profile, folder, rank=rank, device=bench.engine.device)
        self._sampler = TextSampler(run, bench.engine) if run.samples.every else None
        self._restore(watched)
        # A GPU runs ahead while the previous step's numbers are reduced; so do stages of a pipeline without flushes.
        self._resolve_late = self.engine.device.type == "cuda" or self.engine.updates.is_delayed
        self._last_saved = self.engine.steps_done if is_saved else store.newest_step() or 0
        self._before: StepTimer | None = None  # of the step before, unless something else came in between
        self._last_measured = 0
        self._slow_rank: int | None = None  # that was named last
        self._gap = GapWatch(os.environ)
        self._recompiles = RecompileWatch() if self.engine.plan.compile.enabled else None
        self._described: dict[str, Any] = {
            "run": run.model_dump(mode="json", exclude_none=True),
            "data": bench.contents,
        }
        if bench.base_digest is not None:
            self._described["base"] = bench.base_digest
        self.engine.commit_meta = lambda: self._consumed(self.samples + run.train.global_batch)

    def run(self) -> LoopOutcome:
        try:
            return self._run()
        except SaveError as error:
            error.hint += f" The run has ended; {self._resume_hint()}"
            raise
        finally:
            self.measuring.finish()
            self._profiler.close()
            if self._profiler.written:
                self.display.line(f"profile: {', '.join(self._profiler.written)}")
            if self._recompiles is not None:
                self._recompiles.close()

    def _run(self) -> LoopOutcome:
        pending: PendingStep | None = None
        stopping = bool(self.best.ending)
        if self.bad_steps.policy == "rewind" and self.engine.steps_done == 0:
            with phase("saving a checkpoint", is_slow=True):
                self._save(asynchronous=False)  # a rewind always has a checkpoint
        while not stopping and self.engine.steps_done < self.run_spec.train.steps and self._has_data():
            current = self._train_step()
            if not self._resolve_late:
                stopping = self._finish_step(current)
            elif pending is not None:
                stopping = self._finish_step(pending)
            pending = current if self._resolve_late else None
            if pending is not None and (self._is_pause(self.engine.steps_done) or stopping):
                stopping = self._finish_step(pending) or stopping
                pending = None
            self._pause(stopping=stopping)
        if pending is not None:
            self._finish_step(pending)
        with phase("draining the pipeline"):
            self.engine.drain()
        self._end(stopping=stopping)
        return self.outcome

    def _resume_hint(self) -> str:
        newest = self.store.newest_step()
        where = f"from step {newest}" if newest is not None else "from the start"
        return f"weft train --resume {self.store.root.parent} continues {where}."

    def _train_step(self) -> PendingStep:
        step = self.engine.steps_done + 1
        with self._profiler.step(step):
            return self._make_step(step)

    def _make_step(self, step: int) -> PendingStep:
        with self._timed(TimeTerm.DATA), phase(f"reading the batch of step {step}"):
            batch = self.bench.training.batch(self.samples)
        rate = learning_rate_at(self.run_spec.train, step)
        if self.measuring.is_active:
            self._last_measured = step
        # The first step compiles, by stages one after the other.
        self.bad_steps.begin()
        with phase(f"step {step}", is_slow=self.outcome.steps == 0), self.measuring.step():
            pending = self.engine.step_nowait(
                batch, learning_rate=rate, vote_stop=self.stop.requested or self._is_stopping
            )
        self._warn_recompiled(step)
        self.samples += self.run_spec.train.global_batch
        return pending

    def _warn_recompiled(self, step: int) -> None:
        """Warn about compilation in later steps, which makes them slow, and about compiler failures in the first."""
        causes = self._recompiles.take() if self._recompiles is not None else []
        if causes and self.outcome.steps > 0:
            self.display.line(f"warning: blocks were recompiled in step {step}: {'; '.join(causes)}")
        for cause in failures(self.engine.model) if self._recompiles is not None and self.outcome.steps == 0 else ():
            self.display.line(f"warning: blocks run eagerly and slower: the compiler failed: {cause}")

    def _finish_step(self, pending: PendingStep) -> bool:
        """Log the step's numbers; return whether some rank wants to stop."""
        with phase(f"step {pending.step}", is_slow=self.outcome.steps == 0):
            record, wants_stop = pending.resolve()
        # of the device: the host may be ahead of it by less than a step
        seconds, self._before = pending.timer.seconds_since(self._before), pending.timer
        peaks = read_allocator(self.engine.device)
        record = dataclasses.replace(
            record,
            step_s=seconds,
            tokens_per_s=record.tokens / seconds if seconds > 0 else 0.0,
            peak_memory_bytes=peak_memory_bytes(self.engine.device) if peaks is None else peaks.allocated_bytes,
            reserved_memory_bytes=peaks.reserved_bytes if peaks is not None else None,
        )
        if warning := self._gap.warning(peaks):
            self.display.line(warning)
        self._count_seconds(pending)
        self.outcome.steps += 1
        if (bad := self.bad_steps.found) is not None and bad.step == record.step:
            record = dataclasses.replace(record, bad_step=bad.reason)
            if self._handle_bad(bad):
                return False
        else:
            self._require_finite(record)
        if self._due.is_evaluation(record.step) and not wants_stop:
            if record.step == self.run_spec.train.steps and self.engine.plan.offload.delayed:
                self.engine.updates.restart()  # the last evaluation is of the weights that are saved
            record = self._evaluated(record)
            self._before = None
        record = self._with_pace(record)
        self.metrics.write(record)
        if self._due.is_sampled(record.step) and not wants_stop:
            self._write_texts(record.step)
        if pending.router is not None and self._due.is_logged(record.step):
            self.metrics.write_experts(pending.router.loads(record.step))
        self.display.step(record)
        for callback in self._callbacks:
            self._is_stopping |= callback(record) is True
        if self.outcome.steps == 1:
            self.display.dtypes(self.engine.dtypes())
            for note in self.engine.buffer_sync.notes():
                self.display.line(f"note: {note}")
        return wants_stop or bool(self.best.ending)

    def _with_pace(self, record: StepRecord) -> StepRecord:
        """The record with the rank that the others wait for, every few seconds; a line when it is another one."""
        known = paces()
        slow = slow_rank(known.take(), step_s=record.step_s) if known is not None else None
        if slow is None:
            return record
        if slow.rank != self._slow_rank:
            self._slow_rank = slow.rank
            self.display.line(f"warning: {slow}")
        return dataclasses.replace(record, slow_rank=slow.rank, slow_rank_s=slow.work_s, other_ranks_s=slow.others_s)

    def _count_seconds(self, pending: PendingStep) -> None:
        """Add the step's seconds. Measured steps are slower: theirs are dropped at the first step without measuring."""
        if pending.step == self._last_measured + 1:
            self.outcome.timed_steps = 0
            self.outcome.seconds.update(dict.fromkeys(STEP_TERMS, 0.0))
        found = pending.timer.seconds()
        parts_s = found.get(TimeTerm.FORWARD, 0.0) + found.get(TimeTerm.BACKWARD, 0.0)
        found.setdefault(TimeTerm.FORWARD_BACKWARD, parts_s)  # a pipeline reports only their sum
        for term, seconds in found.items():
            self.outcome.seconds[term] += seconds
        self.outcome.timed_steps += 1

    def _pause(self, *, stopping: bool) -> None:
        """Between steps: poll finished saves, start due ones."""
        with self._timed(TimeTerm.CHECKPOINT), phase("saving a checkpoint", is_slow=True):
            self.store.poll()
            if self.copies is not None and not stopping and self._due.is_copied(self.engine.steps_done):
                self.copies.take(*self._state_and_meta(), step=self.engine.steps_done)
                self._before = None
            is_due = self._due.is_checkpoint(self.engine.steps_done) or self._is_kept_best
            if not stopping and is_due and self._last_saved != self.engine.steps_done:
                self._save(asynchronous=self.run_spec.checkpoint.asynchronous)
                self._before = None

    def _end(self, *, stopping: bool) -> None:
        with self._timed(TimeTerm.CHECKPOINT), phase("saving the last checkpoint", is_slow=True):
            if (stopping or self.run_spec.checkpoint.at_end) and self._last_saved != self.engine.steps_done:
                self._save(asynchronous=False)
            self.store.wait()
        self.outcome.ending = self.best.ending if self.engine.steps_done < self.run_spec.train.steps else ""
        if self.outcome.ending:
            self.display.line(f"the run ends after step {self.engine.steps_done}: {self.outcome.ending}")
        self.outcome.checkpoints = [checkpoint_row(committed) for committed in self.store.history]
        if stopping and not self.outcome.ending and self.engine.steps_done < self.run_spec.train.steps:
            self.outcome.status = "stopped"

    def _save(self, *, asynchronous: bool) -> None:
        state, meta = self._state_and_meta()
        # states in files are saved from there, without a copy: the next step must not change them meanwhile
        is_copied = self.engine.offload is None or not self.engine.offload.memory.is_in_files
        best = self.best.facts() if self._is_kept_best else None
        self.store.save(state, meta, step=self.engine.steps_done, asynchronous=asynchronous and is_copied, best=best)
        self._last_saved, self._is_best = self.engine.steps_done, False

    def _state_and_meta(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state = self.engine.state()  # first: it drains the pipeline, which changes the scalars
        return state, {"engine": self.engine.scalars(), **self._consumed(self.samples)}

    def _consumed(self, samples: int) -> dict[str, Any]:
        """The run, its data, and the place in it after so many samples."""
        place = {"samples": samples, "stream": self.bench.training.state(samples)}
        watched = {"best": self.best.state(), "bad_steps": self.bad_steps.state()}
        return {**place, "watched": watched, **self._described}

    def _restore(self, watched: Mapping[str, Any] | None) -> None:
        """Continue with the evaluations and losses of a checkpoint."""
        self.best.restore((watched or {}).get("best"))
        self.bad_steps.restore((watched or {}).get("bad_steps"))

    def _evaluated(self, record: StepRecord) -> StepRecord:
        """The record with the losses of all evaluation sets."""
        found: dict[str, EvalRecord] = {}
        if self.bench.evaluation:
            run = self.run_spec
            is_average = run.evaluation.weights == "ema" or is_averaged(run.train.optimizer)
            with self._timed(TimeTerm.EVALUATION), phase("evaluation"), self.engine.average_weights(is_on=is_average):
                found = {name: self.engine.evaluate(one.batches()) for name, one in self.bench.evaluation.items()}
        self._is_best = self.best.see(record.step, {name: one.loss for name, one in found.items()})
        if named := {name: one for name, one in found.items() if name != HELD_OUT}:
            self.display.line(evaluation_line(record.step, named))
        held_out = found.get(HELD_OUT)
        loss = held_out.loss if held_out is not None else None
        return dataclasses.replace(record, eval_loss=loss, evaluations=named or None)

    def _write_texts(self, step: int) -> None:
        """Let the model write, and show it."""
        assert self._sampler is not None
        with self._timed(TimeTerm.EVALUATION), phase("sampling texts", is_slow=True):
            texts = self._sampler.sample(step)
        self.metrics.write_samples(texts)
        self.display.texts(texts)
        self._before = None

    def _has_data(self) -> bool:
        return self.bench.training.has_batch(self.samples)

    @property
    def _is_kept_best(self) -> bool:
        """Whether the state that the newest evaluation measured is to be kept as the best."""
        return self._is_best and self.run_spec.checkpoint.keep_best is not None

    def _is_pause(self, step: int) -> bool:
        """Whether the engine's state is read after this step, so that nothing may be in flight."""
        return self.bad_steps.found is not None or self._due.is_pause(step)

    def _handle_bad(self, bad: BadStep) -> bool:
        """Skip, rewind or stop; whether the step is to be made again."""
        steps = self.bad_steps
        first_sample = self.samples - self.run_spec.train.global_batch
        steps.undo()
        steps.forget()
        if steps.policy == "skip":
            steps.num_skipped += 1
            kept = steps.keep(bad, first_sample=first_sample, action="skip")
            self.display.line(f"warning: step {bad.step} made no update: {bad.reason}; {kept}")
            return False
        if steps.may_rewind:
            self._rewind(bad, steps.keep(bad, first_sample=first_sample, action="rewind"))
            return True
        kept = steps.keep(bad, first_sample=first_sample, action="stop")
        self.engine.steps_done, self.samples = bad.step - 1, first_sample
        with phase("saving the last checkpoint", is_slow=True):
            if self._last_saved != self.engine.steps_done:
                self._save(asynchronous=False)
            self.store.wait()
        raise steps.error(bad, kept, saved=self._resume_hint().rstrip("."))

    def _rewind(self, bad: BadStep, kept: str) -> None:
        """Load the newest checkpoint; the data goes on after the bad batch. Collective."""
        self.bad_steps.num_rewinds += 1
        with phase("going back to the last checkpoint", is_slow=True):
            self.store.wait()
            loaded = self.store.load(self.engine.state())
            self.engine.restore_meta(loaded.meta)
        self._restore(loaded.meta["watched"])
        self.metrics.rewind(loaded.step)
        self._last_saved, self._before = loaded.step, None
        count = f"rewind {self.bad_steps.num_rewinds} of {self.run_spec.train.max_rewinds}"
        self.display.line(
            f"warning: step {bad.step} made no update: {bad.reason}; {kept}; the run goes back to step {loaded.step}"
            f" and on with sample {self.samples} ({count})"
        )

    def _require_finite(self, record: StepRecord) -> None:
        # A skipped fp16 step has an infinite norm; no loss scale can repair a loss that is not finite.
        if math.isfinite(record.loss) and (math.isfinite(record.grad_norm) or record.skipped):
            return
        what = "loss" if not math.isfinite(record.loss) else "gradient norm"
        batch_rows = self.run_spec.train.global_batch
        first_sample = self.samples - (self.engine.steps_done - record.step + 1) * batch_rows
        bad = BadStep(
            step=record.step, loss=record.loss, grad_norm=record.grad_norm, reason=f"the {what} is not finite"
        )
        kept = self.bad_steps.keep(bad, first_sample=first_sample, action="end")
        raise NumbersError(
            f"the {what} of step {record.step} is not finite: loss {record.loss}, gradient norm {record.grad_norm};"
            f" {kept}",
            hint="lower train.learning_rate or raise train.warmup_steps, then --resume from the last checkpoint",
        )

    @contextmanager
    def _timed(self, term: TimeTerm) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.outcome.seconds[term] += time.perf_counter() - began_s
