"""What a dry run predicts against what one GPU measures: allocated and reserved memory of the engine's own step.

    python benchmarks/dryrun_memory.py predict --out PREDICTED.json                    without a GPU; commit it
    python benchmarks/dryrun_memory.py measure --out MEASURED.jsonl                    on the GPU, under ten minutes
    python benchmarks/dryrun_memory.py compare PREDICTED.json MEASURED.jsonl --out TABLE.md

`measure` runs the real step of one rank; of more ranks than one it is rank r with torch's `fake` process group, whose
collectives copy this rank's own values, so kernels, streams and buffers are real and only the wire is not. Each case
has a process of its own: three steps, then the peaks of two more. Cases are in dryrun_cases.py.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

# A look for GPUs by way of the driver would spoil the processes forked from this one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch.distributed as dist
import transformers
from dryrun_cases import CASES, Case, shrunk
from dryrun_table import compare, lines_of

from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec, RunSpec
from weft.core.vocabulary import BYTE_VOCABULARY
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.build import build_config, build_skeleton

copied: Counter[str] = Counter()  # calls of collectives whose outputs were filled
WARM_STEPS, MEASURED_STEPS, MOST_WARM_STEPS = 3, 2, 12
CASE_TIMEOUT_S = 300


def main() -> None:
    given = _arguments()
    cases = [case for case in CASES if any(part in case.name for part in given.only or [""])]
    part, parts = (int(number) for number in given.part.split("/"))
    cases = cases[part - 1 :: parts]
    if given.verb == "predict":
        predict(cases, Path(given.out))
    elif given.verb == "measure":
        measure(cases, Path(given.out), device=given.device, tiny=given.tiny, start=given.start)
    else:
        text = compare(Path(given.predicted), Path(given.measured))
        Path(given.out).write_text(text, encoding="utf-8") if given.out else print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("predict", "measure"):
        command = verbs.add_parser(verb)
        command.add_argument("--out", required=True)
        command.add_argument("--only", action="append", help="cases whose name has this in it; may be repeated")
        command.add_argument("--part", default="1/1", help="2/8: the second of eight parts, to run side by side")
    command.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    command.add_argument("--tiny", action="store_true", help="toy sizes: tries the code, measures nothing")
    command.add_argument("--start", default="fork", choices=["fork", "fresh"], help="how a case gets its process")
    command = verbs.add_parser("compare")
    command.add_argument("predicted")
    command.add_argument("measured")
    command.add_argument("--out")
    parser.set_defaults(only=None, part="1/1")
    return parser.parse_args()


def versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


# --- predict --------------------------------------------------------------------------------------------------------


def predict(cases: list[Case], out: Path) -> None:
    """A dry run of every case, about half a minute each; the file is whole after each, cases it has are kept."""
    _import_models(cases)
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"cases": {}}
    found["versions"] = versions()
    for case in cases:
        if "error" not in found["cases"].get(case.name, {"error": "none yet"}):
            continue
        found["cases"][case.name] = _forked(_predicted, case)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(case.name, _brief(found["cases"][case.name]), flush=True)


def _predicted(case: Case) -> dict[str, Any]:
    from weft.dryrun.run import dry_run  # the GPU machine has no need of it

    try:
        found = dry_run(_run_of(case), Plan.from_tables(case.plan_tables()), rank=case.rank)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    memory = found.as_dict()["memory"]
    return {
        "allocated_bytes": found.peak_bytes,
        "reserved_bytes": memory["reserved_bytes"],
        "terms": found.terms,
        "peak_at": memory["peak_at"],
        "notes": list(found.notes),
        "elapsed_s": round(found.elapsed_s, 2),
    }


def _run_of(case: Case) -> RunSpec:
    return RunSpec.from_tables(case.run_tables(), source=case.name)


def _brief(record: dict[str, Any]) -> str:
    if "error" in record:
        return str(record["error"])[:200]
    sizes = {key: value for key, value in record.items() if key in ("allocated_bytes", "reserved_bytes")}
    return json.dumps(sizes) + f" {record['elapsed_s']} s"


# --- measure --------------------------------------------------------------------------------------------------------


def measure(cases: list[Case], out: Path, *, device: str, tiny: bool, start: str) -> None:
    """Every case in a process of its own, a JSON line each; a case that has its line already is not run again."""
    done = {record["name"] for record in lines_of(out)} if out.exists() else set()
    _import_models(cases)
    for case in (case for case in cases if case.name not in done):
        began_s = time.perf_counter()
        record = _forked(_measured, case, device, tiny) if start == "fork" else _fresh(case, device, tiny)
        if start == "fork" and _is_spoilt(str(record.get("error"))):
            record = _fresh(case, device, tiny)
        record = {"name": case.name, "versions": versions(), "elapsed_s": 0.0, **record}
        record["elapsed_s"] = round(time.perf_counter() - began_s, 2)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(case.name, _brief(record), flush=True)


def _import_models(cases: list[Case]) -> None:
    """Once, before forking: importing a family takes seconds. One thread: a child must not wait for its parent's."""
    torch.set_num_threads(1)
    for kind, config in {case.kind: shrunk(case.config) for case in cases}.items():
        build_skeleton(build_config(ModelSpec(type=kind, config=config), vocab_size=BYTE_VOCABULARY))


def _is_spoilt(error: str) -> bool:
    """Something looked at the GPU before the fork."""
    return "forked subprocess" in error or ("CUDA" in error and "initializ" in error)


def _forked(work: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """`work(*given)` in a child. Everything is imported already and the GPU first touched there: its pool is fresh."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, work, given))
    process.start()
    theirs.close()
    try:
        return dict(ours.recv()) if ours.poll(CASE_TIMEOUT_S) else {"error": f"no answer in {CASE_TIMEOUT_S} s"}
    except EOFError:
        process.join()
        return {"error": f"the process died with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _child(answer: Any, work: Callable[..., dict[str, Any]], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # makes the thread pool anew after the fork; autograd's threads would race for it
    answer.send(work(*given))
    answer.close()


def _fresh(case: Case, device: str, tiny: bool) -> dict[str, Any]:
    code = "import sys, json, dryrun_memory as d; d._answer(*json.loads(sys.argv[1]))"
    given = json.dumps([case.name, device, tiny])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, given], env=environment, capture_output=True, text=True,
            timeout=CASE_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {CASE_TIMEOUT_S} s"}
    if done.returncode:
        return {"error": done.stderr[-500:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _answer(name: str, device: str, tiny: bool) -> None:
    """The end of `_fresh` in the other process."""
    case = next(case for case in CASES if case.name == name)
    print(json.dumps(_measured(case, device, tiny)))


def _measured(case: Case, device: str, tiny: bool) -> dict[str, Any]:
    """Never raises: what went wrong is the record."""
    if tiny:
        case = replace(case, config=shrunk(case.config), length=32)
    try:
        if device == "cuda":
            _prepare_gpu(case)
        with _ranks(case):
            return _steps(case, torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    except torch.OutOfMemoryError as error:
        return {**_peaks(), "out_of_memory": True, "asked": str(error).partition(". GPU")[0]}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"[:800]}


def _prepare_gpu(case: Case) -> None:
    settings = f"expandable_segments:{case.expandable}"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
    # private, but the variable is read only once and the parent may have had it read; what came of it is recorded
    with suppress(Exception):
        torch.cuda.memory._set_allocator_settings(settings)
    torch.cuda.set_device(0)
    torch.cuda.init()
    for _ in range(20):  # the memory of the case before may still be on its way back
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        if free_bytes > 0.98 * total_bytes:
            return
        time.sleep(0.25)


def _steps(case: Case, device: torch.device) -> dict[str, Any]:
    free_bytes, total_bytes = torch.cuda.mem_get_info() if device.type == "cuda" else (0, 0)
    engine = _engine(case, device)
    run = _run_of(case)
    vocabulary = min(case.config.get("vocab_size", BYTE_VOCABULARY), 50_000)
    losses: list[float] = []

    def step() -> bool:
        """Whether the weights moved: fp16 leaves out updates until its scale fits, and states come with the first."""
        tokens = torch.randint(0, vocabulary, (case.rows, run.data.sequence_length + 1))
        record = engine.step({"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
        losses.append(round(record.loss, 4))
        return not record.skipped

    moved = [step() for _ in range(WARM_STEPS)]
    while not any(moved) and len(moved) < MOST_WARM_STEPS:
        moved.append(step())
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    moved += [step() for _ in range(MEASURED_STEPS)]
    return {
        **_peaks(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "losses": losses,
        "updates": sum(moved),
        "copied": dict(copied),  # empty for many ranks: fully_shard calls its collectives by other names
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
    }


def _engine(case: Case, device: torch.device) -> Engine:
    run = _run_of(case)
    config = build_config(run.model, vocab_size=BYTE_VOCABULARY)
    engine = Engine(
        build_skeleton(config, attention=run.model.attention),
        Plan.from_tables(case.plan_tables()),
        optimizer=OptimizerPolicy.of(run.train),
        seed=run.train.seed,
        clip_norm=run.train.clip_norm,
        weights=_Ones(build_skeleton(config), device),
        device=device,
    )
    _randomise(engine.model)
    return engine


def _peaks() -> dict[str, Any]:
    if not torch.cuda.is_initialized():
        return {"allocated_bytes": 0, "reserved_bytes": 0}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "expandable_segments": any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()),
    }


class _Ones:
    """Weights without memory of their own: drawing by the model's rules would take longer than the steps."""

    def __init__(self, skeleton: torch.nn.Module, device: torch.device) -> None:
        self._shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
        self._one = torch.ones((), device=device)

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Callable[[tuple[slice, ...]], torch.Tensor]]]:
        for name in names:
            yield name, functools.partial(self._read, self._shapes[name])

    def _read(self, shape: torch.Size, index: tuple[slice, ...]) -> torch.Tensor:
        return self._one.expand(shape)[index]


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    """In place. Equal weights would send every token to the same experts; vectors stay one, biases become zero."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.ndim >= 2:
            local.normal_(0.0, 0.02)
        elif name.endswith("bias"):
            local.zero_()


@contextmanager
def _ranks(case: Case) -> Iterator[None]:
    """Rank r of many on a group that sends nothing; one rank needs none, the engine makes its own."""
    if case.num_ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # no public form of a world that is not there

    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.num_ranks)
    with ExitStack() as stack:
        for name, fill in FILLS.items():
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, _copying(getattr(dist, name), fill)))
        yield


def _copying(original: Callable[..., Any], fill: Callable[[torch.Tensor, torch.Tensor, Any], None]) -> Any:
    """The fake group leaves outputs unwritten; NaNs in them would skip fp16's updates and spoil routing."""
    signature = inspect.signature(original)

    def called(*args: Any, **kwargs: Any) -> Any:
        copied[original.__name__] += 1
        work = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        output, own = list(given.values())[:2]  # their names differ between the two collectives
        with torch.no_grad():
            fill(output, own, given.get("group"))
        return work

    return called


def _spread(output: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    rank = dist.get_rank(group)
    for index, part in enumerate(output.flatten().split(own.numel())):
        if index != rank:  # its own place may be the very memory of `own`
            part.copy_(own.flatten())


def _keep_own(output: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    output.flatten().copy_(whole.flatten().split(output.numel())[dist.get_rank(group)])


# fully_shard's collectives, by the names of torch 2.11 and of 2.13
FILLS = {
    "all_gather_into_tensor": _spread,
    "all_gather_single": _spread,
    "reduce_scatter_tensor": _keep_own,
    "reduce_scatter_single": _keep_own,
}


if __name__ == "__main__":
    main()
