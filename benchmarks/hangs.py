"""Plant hangs in real trainings: is the right rank named within the bound, and is a slow rank no hang?

    python benchmarks/hangs.py --bound 20 --out benchmarks/results/hangs-DATE.md
    python benchmarks/hangs.py --only "pp 2" --kinds stop,lock

Each case is a training of a tiny model under weft's launcher. In step 7 one rank is stopped (SIGSTOP), loops in Python,
sleeps in C without releasing the interpreter lock, skips a collective, or gives one a tensor of another size. The error
must name that rank, come within `train.hang_timeout_s`, have exit code 3 and leave no process. The last runs have one
rank whose every step takes ten times as long: they must finish.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

STEP, SLOW_STEPS, SLOWER = 7, 20, 10
PLANT_VARIABLE = "WEFT_HANG_PLANT"
LLAMA = {"type": "llama", "config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4}}  # fmt: skip
MIXTRAL = {"type": "mixtral", "config": {**LLAMA["config"], "num_local_experts": 4, "num_experts_per_tok": 2}}  # type: ignore[dict-item]
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp 2": {"mesh": {"dp_replicate": 2}},
    "ddp 3": {"mesh": {"dp_replicate": 3}},
    "zero-3 2": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
    "tp 2": {"mesh": {"tp": 2}},
    "pp 2": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 2}},
    "ep 2": {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}},
}
KINDS = ("stop", "loop", "lock", "skip", "shape")


@dataclass(frozen=True)
class Case:
    kind: str
    layout: str
    rank: int


@dataclass
class Row:
    kind: str
    layout: str
    planted: int
    named: str
    where: str
    stack: str
    seconds: float
    message: str
    is_right: bool


def cases() -> list[Case]:
    """Four layouts with every kind; then three ranks and experts for kinds that depend on them."""
    four = ("ddp 2", "zero-3 2", "tp 2", "pp 2")
    grid = [
        Case(kind, layout, (at + number) % 2) for at, kind in enumerate(KINDS) for number, layout in enumerate(four)
    ]
    more = [Case("skip", "ddp 3", 1), Case("shape", "ddp 3", 2), Case("loop", "ep 2", 1), Case("lock", "ep 2", 0)]
    return [*grid, *more]


def main() -> int:
    if PLANT_VARIABLE in os.environ:
        return rank_main()
    given = _arguments()
    rows, slow = [], []
    chosen = [case for case in cases() if given.only in case.layout and case.kind in given.kinds.split(",")]
    known = given.rows.read_text().splitlines() if given.rows and given.rows.exists() else []
    done = {(row.kind, row.layout): row for row in (Row(**json.loads(line)) for line in known)}
    for case in chosen[: given.most]:
        rows.append(done.get((case.kind, case.layout)) or planted(case, given))
        print(json.dumps(asdict(rows[-1])), flush=True)
        if given.rows and (case.kind, case.layout) not in done:
            with given.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(rows[-1])) + "\n")
    for layout in ("ddp 2", "zero-3 2", "pp 2") if given.slow else ():
        slow.append((layout, *slowed(layout, given)))
        print(slow[-1], flush=True)
    text = page(rows, slow, given)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    return int(not all(row.is_right for row in rows) or any(error for _, error, *_ in slow))


def planted(case: Case, given: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory(prefix="weft-hang-") as name:
        folder = Path(name)
        error = train(case, given, folder, steps=30)
        seconds = time.time() - float((folder / "planted").read_text()) if (folder / "planted").exists() else -1.0
        left = [pid for pid in pids(folder) if is_alive(pid)]
    message = error.message if error is not None else "no error"
    first = message.split(":")[0] if " did not arrive " in message else message.partition(" issues ")[0]
    found = re.match(r"rank (\d+) \(host", first)
    where = re.search(r"did not arrive in (.*?) within|(number \d+ \(.*?\))", message)
    stack = re.search(r"innermost first: (.*?)(?:;|$)", error.hint if error is not None else "")
    named = found[1] if found else "-"
    is_right = named == str(case.rank) and 0 < seconds < given.bound and not left
    is_right = is_right and error is not None and error.exit_code == 3
    return Row(
        kind=case.kind,
        layout=case.layout,
        planted=case.rank,
        named=named,
        where=next((one for one in where.groups() if one), "") if where else "",
        stack=stack[1].split(" < ")[0] if stack else "",
        seconds=round(seconds, 1),
        message=message,
        is_right=is_right,
    )


def slowed(layout: str, given: argparse.Namespace) -> tuple[str, float, float, str]:
    """(the error, "" if the run finished; seconds per step before and after; what the log says of the slow rank)."""
    with tempfile.TemporaryDirectory(prefix="weft-slow-") as name:
        folder = Path(name)
        error = train(Case("slow", layout, 1), given, folder, steps=SLOW_STEPS)
        file = folder / "run" / "metrics.jsonl"
        steps = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        ledger = folder / "run" / "ledger.json"
        remarks = json.loads(ledger.read_text())["remarks"] if ledger.exists() else []
    seconds = [step["step_s"] for step in steps]
    fast, slow = (sorted(part)[len(part) // 2] if part else 0.0 for part in (seconds[1:3], seconds[STEP:]))
    return (
        error.message if error is not None else "",
        fast,
        slow,
        next((line for line in remarks if "makes the others wait" in line), "-"),
    )


def train(case: Case, given: argparse.Namespace, folder: Path, *, steps: int) -> Any:
    """Train under the launcher with the fault planted; its error, or None."""
    from weft.core.errors import WeftError
    from weft.core.run_spec import RunSpec
    from weft.launch.local import launch
    from weft.train.job import Job

    run = RunSpec.from_tables(
        {
            "model": MIXTRAL if case.layout.startswith("ep") else LLAMA,
            "data": {"tokenizer": "bytes", "sequence_length": 32},
            "train": {"steps": steps, "global_batch": 12, "hang_timeout_s": given.bound},
            "checkpoint": {"at_end": False},
            "logging": {"tensorboard": False},
            "evaluation": {"every": 0},
            "ledger": {"dry_run": False, "measure": False},
        }
    )
    job = Job.create(
        run=run, plan_tables=LAYOUTS[case.layout], out=folder / "run", device="cpu", quiet=case.kind != "slow"
    )
    (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
    os.environ[PLANT_VARIABLE] = json.dumps({**asdict(case), "mark": str(folder / "planted")})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")])
    command = [sys.executable, "-m", "hangs", str(folder / "job.json")]
    try:
        launch(command, num_ranks=job.plan.num_ranks, scratch=folder / "ranks", imports=["weft.train.worker"])
    except WeftError as error:
        return error
    finally:
        del os.environ[PLANT_VARIABLE]
    return None


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("ranks/generation-0/pid-*")]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- in the ranks


def rank_main() -> int:
    from weft.core.quiet import quiet_libraries

    quiet_libraries()
    from weft.train.job import Job
    from weft.train.ranks.process import report_failures

    with report_failures():
        from weft.train.worker import run_job

        if int(os.environ["RANK"]) == json.loads(os.environ[PLANT_VARIABLE])["rank"]:
            plant(json.loads(os.environ[PLANT_VARIABLE]))
        run_job(Job.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")))
    return 0


def plant(case: dict[str, Any]) -> None:
    """From now on this rank misbehaves once in step STEP; a slow one in every step from then on."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    from weft.train.loop import TrainingLoop

    armed = {"is": False, "step_s": 0.0}
    train_step = TrainingLoop._train_step

    def step(loop: TrainingLoop) -> Any:
        number, began_s = loop.engine.steps_done + 1, time.perf_counter()
        armed["is"] = number >= STEP if case["kind"] == "slow" else number == STEP
        pending = train_step(loop)
        if number < STEP:
            armed["step_s"] = time.perf_counter() - began_s
        return pending

    def once(act: Callable[[], Any]) -> None:
        if armed["is"]:
            armed["is"] = False
            Path(case["mark"]).write_text(str(time.time()))
            act()

    TrainingLoop._train_step = step  # type: ignore[method-assign]
    if case["kind"] in ("skip", "shape"):
        change_collective(case, once)
        return
    acts: dict[str, Callable[[], Any]] = {
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "loop": spin,
        "lock": lambda: ctypes.PyDLL(None).sleep(3600),
        "slow": lambda: time.sleep((SLOWER - 1) * armed["step_s"]),
    }
    register_module_forward_pre_hook(lambda *_: once(acts[case["kind"]]))


def spin() -> None:
    number = 0
    while True:
        number += 1


def change_collective(case: dict[str, Any], once: Callable[[Callable[[], Any]], None]) -> None:
    """Skip one collective that the layout issues from Python, or give it longer tensors."""
    import torch
    import torch.distributed as dist

    name = "all_reduce"
    if case["layout"] == "zero-3 2":  # of fully_shard
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)

    def longer(value: Any) -> Any:
        return torch.cat([value.reshape(-1)] * 2) if isinstance(value, torch.Tensor) else value

    def changed(*args: Any, **kwargs: Any) -> Any:
        is_now: list[bool] = []
        once(lambda: is_now.append(True))
        if not is_now:
            return original(*args, **kwargs)
        if case["kind"] == "skip":
            return Done()
        return original(*map(longer, args), **{key: longer(value) for key, value in kwargs.items()})

    setattr(dist, name, changed)


class Done:
    """The work of a collective that was not issued."""

    def wait(self) -> bool:
        return True


# ------------------------------------------------------------------------------------------------------------ results


def page(rows: list[Row], slow: list[tuple[str, str, float, float, str]], given: argparse.Namespace) -> str:
    import torch

    right = sum(row.is_right for row in rows)
    lines = [
        f"# Planted hangs: {right} of {len(rows)} named, {sum(bool(one[1]) for one in slow)} false alarms in"
        f" {len(slow)} slowed runs",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, shared with other work; torch {torch.__version__}, Gloo, Python"
        f" {platform.python_version()}. train.hang_timeout_s = {given.bound:g}. Tiny models; no GPU, one host.",
        "Seconds: from the planted fault to the launcher's error, with all processes gone.",
        "",
        f"    python benchmarks/hangs.py --bound {given.bound:g}",
        "",
        "| hang | layout | planted in rank | named | where | its stack | s | right |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.kind} | {row.layout} | {row.planted} | {row.named} | {row.where} | {row.stack} | {row.seconds}"
        f" | {'yes' if row.is_right else 'NO'} |"
        for row in rows
    ]
    lines += [
        "",
        "stop: SIGSTOP. loop: in Python. lock: a sleep in C, holding the interpreter lock.",
    ]
    lines += [
        "skip: one collective left out. shape: a tensor twice as long.",
        "",
        f"One rank slowed {SLOWER} times from step {STEP} on:",
        "",
    ]
    lines += ["| layout | error | s per step before | after | named as slow |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {error or '-'} | {fast:.2f} | {after:.2f} | {said} |" for name, error, fast, after, said in slow
    ]
    lines += ["", "Messages:", "", *(f"- {row.kind}, {row.layout}: {row.message}" for row in rows)]
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bound", type=float, default=20.0, help="train.hang_timeout_s")
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--most", type=int, default=1000, help="at most so many cases")
    parser.add_argument("--no-slow", dest="slow", action="store_false", help="without the slowed runs")
    parser.add_argument("--rows", type=Path, help="keeps rows, so that a campaign that was interrupted goes on")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
