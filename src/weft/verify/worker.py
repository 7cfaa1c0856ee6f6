"""One rank of a verification: join, shrink, then verify one plan after another; rank 0 writes the verdicts."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from weft.core.errors import PipelineError, TensorParallelError
from weft.core.plan import Plan
from weft.core.router_rules import with_capacity
from weft.core.run_spec import RunSpec
from weft.data import open_corpus
from weft.plan.legality import require_legal
from weft.train.build import prepare_data
from weft.train.ranks.process import Process, join, leave, phase, report_failures
from weft.verify.layouts import plan_name
from weft.verify.request import VerifyRequest
from weft.verify.session import Session
from weft.verify.shrink import shrink
from weft.verify.small_mixture import shrink_mixture
from weft.verify.small_teacher import with_small_teacher
from weft.verify.verdict import Verdict

_PATH_BYTES = 1024


def run_request(request: VerifyRequest, *, progress: Callable[[str, str], None] | None = None) -> list[Verdict]:
    """Verify every plan of the request; the verdicts are meaningful on rank 0. Collective."""
    for plan in request.plans:
        require_legal(plan, request.run)  # shrinking must not make a run legal
    process = join(
        device_type=request.device,
        timeout_s=request.run.train.collective_timeout_s,
        prepare=lambda process: prepare_data(request.run, process, is_speaking=True),
    )
    try:
        with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
            scratch = _agree_on_path(Path(folder), process)
            on_gpu = request.device == "cuda"
            device = torch.device("cuda", process.local_rank) if on_gpu else torch.device("cpu")
            verdicts = _verify_all(request, process, scratch, device, progress or (lambda *_: None))
            if process.world_size > 1:
                dist.barrier()  # rank 0's folder must exist until all ranks have read it
            return verdicts
    finally:
        leave()


def _verify_all(
    request: VerifyRequest,
    process: Process,
    scratch: Path,
    device: torch.device,
    progress: Callable[[str, str], None],
) -> list[Verdict]:
    sessions: dict[str, Session] = {}
    verdicts = []
    request, taught = _with_small_teacher(request, process, scratch)
    for asked in request.plans:
        run, plan, changes = _small_run(request, asked)
        changes += taught
        run = run.model_copy(update={"router": with_capacity(run.router, plan)})
        key = run.to_toml()
        if key not in sessions:
            sessions[key] = Session(run, process, steps=request.steps, scratch=scratch, device=device)
        name = plan_name(plan)
        with phase(f"verifying {name}", is_slow=True):  # the reference runs on one rank
            report = functools.partial(progress, name)
            try:
                verdicts.append(sessions[key].verify(plan, changes=tuple(changes), progress=report))
            except (TensorParallelError, PipelineError) as error:
                if len(request.plans) == 1:
                    raise
                report(f"left out: {error}")  # one plan of many: every rank raises the same before it trains
    return verdicts


def _with_small_teacher(request: VerifyRequest, process: Process, scratch: Path) -> tuple[VerifyRequest, list[str]]:
    if request.as_is:
        return request, []
    run, changes = with_small_teacher(request.run, scratch / "teacher", is_writer=process.is_main)
    if process.world_size > 1:
        dist.barrier()  # rank 0 writes the folder that all read
    return dataclasses.replace(request, run=run), changes


def _small_run(request: VerifyRequest, plan: Plan) -> tuple[RunSpec, Plan, list[str]]:
    vocab_size = open_corpus(request.run.data).vocab_size
    asked, apart = _apart(request.run)
    run, changes = (asked, []) if request.as_is else shrink(asked, plan, vocab_size=vocab_size)
    plan, mixed = shrink_mixture(plan, original=request.run, small=run, vocab_size=vocab_size)
    return run, plan, [*apart, *changes, *mixed]


def _apart(run: RunSpec) -> tuple[RunSpec, list[str]]:
    """A sample per row where a stream would have tokens without a loss, which the oracle does not find again."""
    if run.data.streaming:
        whole, changes = _apart(run.model_copy(update={"data": run.data.model_copy(update={"streaming": False})}))
        return whole, ["streaming -> the data as a whole", *changes]
    if not any(part.format != "text" and part.row_packing == "concatenate" for part in run.data.parts):
        return run, []
    apart = {"packing": None} if run.data.sources else {"packing": "none", "isolate_documents": False}
    data = run.data.model_copy(update=apart)  # without packing, texts of a mixture stay streams
    return run.model_copy(update={"data": data}), ["packing concatenate -> none"]


def _agree_on_path(folder: Path, process: Process) -> Path:
    """Rank 0's temporary folder, on every rank."""
    letters = torch.zeros(_PATH_BYTES, dtype=torch.uint8)
    if process.is_main:
        name = str(folder).encode()
        letters[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
    if process.world_size > 1:
        dist.broadcast(letters, src=0)
    return Path(bytes(letters.tolist()).rstrip(b"\0").decode())


def main() -> None:
    """A launched rank."""
    with report_failures():
        request = VerifyRequest.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
        verdicts = run_request(request, progress=_report)
        if request.answer is not None and verdicts and verdicts[0].checks and _is_main():
            Path(request.answer).write_text(json.dumps([verdict.as_dict() for verdict in verdicts]), encoding="utf-8")


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _report(plan: str, what: str) -> None:
    if _is_main():
        print(f"{plan}: {what}", file=sys.stderr, flush=True)
