"""One rank of a training: join, build, resume from a checkpoint if asked, train, write the ledger and the report.

`python -m weft.train job.json` is the command of launched ranks; `run_job` is the same in this process.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.checkpoint import CheckpointStore
from weft.checkpoint.memory_copies import MemoryCopies
from weft.core.disk import is_full, no_space
from weft.core.open_choices import with_mixture
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.state_folder import ANY_STEP
from weft.data import Corpus
from weft.data.preview import preview_of
from weft.report import write_report
from weft.train.account import Account
from weft.train.build import Workbench, build_workbench, prepare_data
from weft.train.folder.history import RunHistory, comparable
from weft.train.folder.lock import FolderLock
from weft.train.folder.run_folder import RunFolder
from weft.train.job import Job
from weft.train.ledger.ledger import build_ledger, count_parameters, gather_memory
from weft.train.ledger.rows import with_dry_run
from weft.train.loggers.display import Display
from weft.train.loggers.metrics import MetricsWriter
from weft.train.loggers.trackers import Trackers
from weft.train.loop import TrainingLoop
from weft.train.loop_outcome import LoopOutcome
from weft.train.memory import open_copies
from weft.train.out_of_memory import OutOfMemoryScene, explained
from weft.train.parts import OwnRows, TrainParts
from weft.train.pipeline.record import write_pipeline
from weft.train.pipeline.watch import PipelineWatch
from weft.train.ranks.environment import read_local_size
from weft.train.ranks.pace import slow_rank
from weft.train.ranks.process import Process, StopFlag, join, leave, paces, phase
from weft.train.reference import PairReference, add_reference
from weft.train.resume import Resumed, agree_on_folder, resume_run


def run_job(job: Job, *, lock: FolderLock | None = None, parts: TrainParts | None = None) -> dict[str, Any]:
    """Train; return the ledger. Collective. `lock`: the folder's lock, if the caller keeps it beyond this call.
    `parts`: what a caller gives beside the job."""
    parts = parts or TrainParts()
    started_s = time.perf_counter()
    corpora: list[Corpus] = []  # none if the ranks have joined before
    process = join(
        device_type=job.device,
        timeout_s=job.run.train.collective_timeout_s,
        hang_timeout_s=job.run.train.hang_timeout_s,
        prepare=lambda process: corpora.extend(_prepare(job, parts, process)),
    )
    try:
        with StopFlag() as stop, FolderLock(job.out) as own_lock:
            return _train(job, process, stop, lock or own_lock, corpora, parts, started_s=started_s)
    finally:
        leave()


def _prepare(job: Job, parts: TrainParts, process: Process) -> list[Corpus]:
    return [prepare_data(job.run, process, is_speaking=not job.quiet)] if parts.data is None else []


def _train(
    job: Job,
    process: Process,
    stop: StopFlag,
    lock: FolderLock,
    corpora: list[Corpus],
    parts: TrainParts,
    *,
    started_s: float,
) -> dict[str, Any]:
    device = torch.device(job.device, process.local_rank) if job.device == "cuda" else torch.device("cpu")
    is_speaking = process.is_main and not job.quiet
    display = Display(is_speaking=is_speaking, total_steps=job.run.train.steps, every=job.run.logging.every)
    folder, after_step = agree_on_folder(job, process, lock, display, device=device)
    # Before rank 0 writes there: every rank must read the same.
    history = RunHistory(folder.path)
    before, asked_before = (folder.read_run() if after_step is not None else None), history.asked_for()
    plan = _same_mixture(job.plan, device=device)
    scene = OutOfMemoryScene(run=job.run, plan=plan, device=device, local_ranks=read_local_size(os.environ))
    with explained(scene):
        states = folder.states(after_step=after_step)
        corpus = corpora[0] if corpora else None
        bench = build_workbench(
            job.run, plan, process, device=device, scene=scene, state_folder=states, corpus=corpus, parts=parts
        )
        reference = _add_reference(job, bench, folder, process)
    store = CheckpointStore(
        folder.checkpoints_path,
        process_group=bench.engine.topology.checkpoint_group(),
        keep=job.run.checkpoint.keep,
    )
    with phase("opening the copies in memory"):
        copies, copies_note = open_copies(job.run, plan, bench.engine)
        restored = copies.restore(bench.engine.state, not_before=after_step or 0) if copies is not None else None
    resumed = Resumed()
    if before is not None or restored is not None:
        has_checkpoint = after_step is not None and after_step != ANY_STEP
        resumed = resume_run(
            job, bench, store if has_checkpoint else None, before or job.run, asked_before, display, restored=restored
        )
    resumed_from = bench.engine.steps_done or None
    if process.is_main:  # only now: a refused request must leave the folder unchanged
        if resumed.run is not None:
            history.record(bench.engine.steps_done, resumed.run, resumed.changes)
        _fill_folder(folder, job.run, plan, bench, reference)
    metrics = _open_metrics(job, folder, resumed, process, step=bench.engine.steps_done)
    _introduce(display, bench, plan, process)
    if process.is_main and (job.run.data.sources or job.run.data.format != "text"):
        _show_data(job.run, bench, folder, display, position=resumed.samples)
    for note in filter(None, (reference.note, copies_note, *(copies.notes if copies is not None else ()))):
        display.line(f"note: {note}")
    account = Account(job.run, bench, plan, display=display, is_main=process.is_main)
    scene.measuring = account.measuring
    watch = PipelineWatch(bench.engine)
    loop = TrainingLoop(
        job.run,
        bench,
        store,
        metrics=metrics,
        display=display,
        stop=stop,
        measuring=account.measuring,
        samples=resumed.samples,
        copies=copies,
        is_saved=resumed.is_saved,
        callbacks=parts.callbacks,
        watched=resumed.watched,
        folder=folder.path,
        is_main=process.is_main,
    )
    started = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = _run_loop(loop, scene, display, metrics, done=bench.engine.steps_done)
    facts = {
        "started": started,
        "elapsed_s": time.perf_counter() - started_s,
        "resumed_from": resumed_from,
        **_facts(loop, bench, outcome),
        **comparable(metrics.records, history.read() if process.is_main else []),
    }
    ledger = _close(job, bench, account, watch, outcome, metrics, folder, display, process, facts, copies)
    bench.engine.close()
    return ledger


def _fill_folder(folder: RunFolder, run: RunSpec, plan: Plan, bench: Workbench, reference: PairReference) -> None:
    """Files that describe the run; steps add the others."""
    folder.create(run, plan)
    reference.write(folder)
    if bench.model_config is not None:
        bench.model_config.save_pretrained(str(folder.model_path))


def _open_metrics(job: Job, folder: RunFolder, resumed: Resumed, process: Process, *, step: int) -> MetricsWriter:
    """The writer of the records after `step`; those of an earlier start that went further are dropped."""
    earlier = folder.metrics.drop_after(step) if process.is_main else []
    for beside in (folder.experts, folder.samples) if process.is_main else ():
        if beside.path.exists():
            beside.drop_after(step)
    metrics = MetricsWriter(
        folder,
        is_writing=process.is_main,
        tensorboard=job.run.logging.tensorboard,
        earlier=earlier,
        trackers=Trackers(job.run, folder.path) if process.is_main else None,
    )
    metrics.changed = tuple(change.key for change in resumed.changes if change.is_of_training)
    return metrics


def _facts(loop: TrainingLoop, bench: Workbench, outcome: LoopOutcome) -> dict[str, Any]:
    """What the loop did, for the ledger."""
    return {
        "status": outcome.status,
        "steps": bench.engine.steps_done,
        "ended": outcome.ending or None,
        "best": loop.best.facts(),
        "bad_steps": {"skipped": loop.bad_steps.num_skipped, "rewinds": loop.bad_steps.num_rewinds},
        "no_evaluation": bench.no_evaluation or None,
        "epochs": bench.training.epochs(loop.samples),
    }


def _run_loop(
    loop: TrainingLoop, scene: OutOfMemoryScene, display: Display, metrics: MetricsWriter, *, done: int
) -> LoopOutcome:
    """Run to the end; the display and the metrics are closed however it ends."""
    display.start(done=done)
    try:
        with explained(scene):
            outcome = loop.run()
        metrics.close(is_finished=True)
        return outcome
    finally:
        display.stop()
        metrics.close()


def _same_mixture(plan: Plan, *, device: torch.device) -> Plan:
    """The plan with rank 0's mixture: under torchrun every rank chose its own, and sharded blocks that recompute on
    some ranks only would deadlock."""
    mixture = plan.activations.mixture
    if mixture is None or dist.get_world_size() == 1:
        return plan
    counts = torch.tensor(mixture, dtype=torch.int64, device=device)
    dist.broadcast(counts, src=0)
    full, selective = counts.tolist()
    return with_mixture(plan, (full, selective))


def _add_reference(job: Job, bench: Workbench, folder: RunFolder, process: Process) -> PairReference:
    """Before a checkpoint is loaded: the engine has the initial weights."""
    with phase("computing the reference's log-probabilities", is_slow=True):
        return add_reference(job.run, bench, folder, process)


def _introduce(display: Display, bench: Workbench, plan: Plan, process: Process) -> None:
    parameters, _ = count_parameters(bench.engine)
    num_blocks = len(bench.engine.all_blocks)
    name = getattr(bench.model_config, "model_type", type(bench.engine.model).__name__)
    ranks = f"{process.world_size} rank{'s' if process.world_size > 1 else ''}"
    display.line(
        f"{name}, {parameters:,} parameters, {num_blocks} blocks;"
        f" {plan.strategy_name}, {ranks} on {bench.engine.device.type}, {plan.precision.preset}"
    )
    if plan.activations.mixture is not None:
        full, selective = plan.activations.mixture
        saved = num_blocks - full - selective
        display.line(f"recompute by budget: {full} blocks fully, {selective} selectively, {saved} not at all")
    for note in bench.notes:
        display.line(f"note: {note}")


def _show_data(run: RunSpec, bench: Workbench, folder: RunFolder, display: Display, *, position: int) -> None:
    """Show which tokens have a loss, on the terminal and in the run folder: a wrong mask trains without an error."""
    if isinstance(bench.training, OwnRows):
        return
    with phase("showing a row of the data", is_slow=True):
        if not bench.training.has_batch(position):
            return
        num_samples = run.train.steps * run.train.global_batch
        preview = preview_of(run.data, bench.training, num_samples=num_samples, position=position)
        display.data(preview)
        folder.sample_path.write_text("\n".join([*preview.lines, "", preview.plain(), ""]), encoding="utf-8")


def _close(
    job: Job,
    bench: Workbench,
    account: Account,
    watch: PipelineWatch,
    outcome: LoopOutcome,
    metrics: MetricsWriter,
    folder: RunFolder,
    display: Display,
    process: Process,
    facts: dict[str, Any],
    copies: MemoryCopies | None,
) -> dict[str, Any]:
    with phase("writing the report", is_slow=True):
        ranks = gather_memory(bench.engine, account.measuring.found)
        pipeline = watch.gather(num_measured=account.measuring.num_measured)
        ledger = build_ledger(
            bench.engine,
            run_facts=facts,
            model_name=getattr(bench.model_config, "model_type", "model"),
            notes=(*bench.notes, *bench.engine.buffer_sync.notes()),
            memory_ranks=ranks,
            metrics=metrics.records,
            seconds_per_step=outcome.seconds_per_step(),
            checkpoints=outcome.checkpoints,
            pipeline=pipeline.figures(ranks) if pipeline is not None else None,
            copies=copies,
            **account.columns(),
        )
        if process.is_main:
            _add_pace(ledger)
            folder.write_ledger(ledger)
            write_pipeline(folder.path, pipeline, ranks)
        if process.is_main and not job.quiet:
            display.summary(ledger)
            display.float8(ledger["float8"])
            if ledger["pipeline"] is not None:
                display.pipeline(ledger["pipeline"])
            if not job.dry_run_follows:  # otherwise the table is printed with the dry run's column
                display.costs(ledger)
                _draw_report(folder, display)
    return ledger


def _add_pace(ledger: dict[str, Any]) -> None:
    """Each rank's share of work in the steps, and the rank that the others waited for."""
    known = paces()
    found = [pace for pace in known.whole_run() if pace.looks] if known is not None else []
    slow = slow_rank(found, step_s=ledger["time"]["step_s"] or 0.0)
    ledger["pace"] = {
        "ranks": [{"rank": pace.rank, "host": pace.host, "work_share": pace.work_share} for pace in found],
        "slow_rank": asdict(slow) if slow is not None else None,
    }
    if slow is not None:
        ledger["remarks"].append(str(slow))


def join_dry_run(folder: RunFolder, *, dry: dict[str, Any] | None, remark: str, is_speaking: bool) -> None:
    """Add the dry run's column to a finished run's ledger, or a remark; then print the table and draw the report."""
    display = Display(is_speaking=is_speaking, total_steps=0, every=1)
    ledger = folder.read_ledger()
    if not ledger:
        return
    if dry is not None:
        ledger = with_dry_run(ledger, dry)
    if remark:
        ledger["remarks"] = [*ledger.get("remarks", []), remark]
    folder.write_ledger(ledger)
    display.costs(ledger)
    _draw_report(folder, display)


def _draw_report(folder: RunFolder, display: Display) -> None:
    """Draw the report; a failure here must not fail a finished training."""
    name = _short(folder.path)
    try:
        write_report(folder.path)
    except Exception as error:  # the plotting library may fail in any way
        reason = no_space(folder.path) if is_full(error) else f"{type(error).__name__}: {error}"
        display.line(f"the report was not drawn ({reason}); weft report {name} tries again")
    else:
        display.line(f"run folder {name}; open {name}/report.html")


def _short(path: Path) -> str:
    """Relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
