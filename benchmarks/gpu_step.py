"""Steps of weft and of its peers on one GPU, case by case in turns, against the bars of the GPU's issue.

    python benchmarks/gpu_step.py --results results.jsonl --out benchmarks/results/gpu_step-DATE-h200.md
    python benchmarks/gpu_step.py --only 8b- --budget-s 540 --results results.jsonl --done earlier.jsonl
    python benchmarks/gpu_step.py --only 1b-fake8 --set '1b-fake8/weft:compile.enabled=false'
    python benchmarks/gpu_step.py --budget-s 0 --done results.jsonl --out PAGE.md      # the page alone, runs nothing
    python benchmarks/gpu_step.py --list

Each case is a process of its own: peers through gpu_peers.py, weft through `weft bench step`. Inside a group the cases
take turns, A B C A B C, so that a GPU that warms up disturbs all alike. No case is started whose last duration, or
estimate, does not fit the rest of the budget; every result is a line of the results file at once. A case that failed is
not tried again in the same call. Groups, cases and bars are in gpu_cases.py, the page in gpu_table.py. A folder .carry
beside benchmarks/ is put on the path of every case: packages for a machine that can install nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from gpu_cases import GROUPS, Case, Group, config_of, plan_tables, run_tables
from gpu_table import Record, table

ROOT = Path(__file__).parents[1]
START_MARGIN_S = 5.0  # a process takes this much longer than the last time, and ends on time all the same
LEAST_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    group: Group
    case: Case
    round: int

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.group.name, self.case.name, self.round)

    @property
    def name(self) -> str:
        return f"{self.group.name}/{self.case.name}"


def main() -> int:
    given = _arguments()
    everything = overridden(GROUPS, given.set)
    groups = selected(everything, given.only)
    turns = turns_of(groups, rounds=given.rounds)
    if given.list:
        for turn in turns:
            print(f"{turn.name:<42} round {turn.round}  about {turn.case.estimate_s:.0f} s")
        print(f"{len(turns)} turns, about {sum(turn.case.estimate_s for turn in turns):.0f} s")
        return 0
    earlier = read_records(given.done) if given.done else []
    with tempfile.TemporaryDirectory(prefix="gpu_step_") as scratch:
        runner = Runner(Path(given.scratch or scratch), tiny=given.tiny)
        records = walk(
            turns, earlier=earlier, budget_s=given.budget_s, run=runner.run, clock=time.monotonic,
            keep=lambda record: _append(given.results, record),
        )  # fmt: skip
    names = {group.name for group in groups}
    body = table(records, [group for group in everything if group.name in names])  # cases of earlier calls too
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(
            page_head(records, shlex.join(["python", "benchmarks/gpu_step.py", *sys.argv[1:]])) + body, encoding="utf-8"
        )
    print("\n" + body, end="")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression over GROUP/CASE")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each case")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for the whole call")
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="a line is added for every process")
    parser.add_argument("--done", type=Path, help="results of an earlier call: what it finished is not run again")
    parser.add_argument("--out", type=Path, help="the page")
    parser.add_argument("--scratch", type=Path, help="where run.toml and plan.toml of the cases go, and stay")
    parser.add_argument("--set", action="append", default=[], metavar="GROUP/CASE:TABLE.KEY=VALUE",
                        help="another value in the plan of a case of weft, as TOML; may be repeated")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="small and on a CPU: tries the code, measures nothing")
    parser.add_argument("--list", action="store_true", help="say what would run")
    given = parser.parse_args()
    if given.done and not given.done.is_file():
        parser.error(f"there is no file {given.done}")
    try:
        groups = selected(overridden(GROUPS, given.set), given.only)
    except ValueError as error:
        parser.error(str(error))
    if not groups:
        parser.error(f"no case is called {given.only!r}: --list names them")
    return given


# --- what runs ------------------------------------------------------------------------------------------------------


def selected(groups: Sequence[Group], only: str) -> list[Group]:
    """Groups with those of their cases whose GROUP/CASE has `only` in it; their bars stay."""
    found = [
        replace(group, cases=tuple(case for case in group.cases if re.search(only, f"{group.name}/{case.name}")))
        for group in groups
    ]
    return [group for group in found if group.cases]


def overridden(groups: Sequence[Group], changes: Sequence[str]) -> list[Group]:
    """`groups` with `GROUP/CASE:TABLE.KEY=VALUE` done to the plans named."""
    found = list(groups)
    for change in changes:
        parsed = re.fullmatch(r"([^/:]+)/([^/:]+):(\w+)\.(\w+)=(.+)", change)
        if parsed is None:
            raise ValueError(f"{change!r} is not of the form GROUP/CASE:TABLE.KEY=VALUE")
        group_name, case_name, section, key, text = parsed.groups()
        place = next((place for place, group in enumerate(found) if group.name == group_name), None)
        case = None if place is None else next((c for c in found[place].cases if c.name == case_name), None)
        if place is None or case is None or case.plan is None:
            raise ValueError(f"{group_name}/{case_name} is no case of weft: --list names them")
        plan = copy.deepcopy(case.plan)
        plan.setdefault(section, {})[key] = _toml_value(text)
        changed = tuple(replace(c, plan=plan) if c is case else c for c in found[place].cases)
        found[place] = replace(found[place], cases=changed)
    return found


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a word without quotes, which shells take away


def turns_of(groups: Sequence[Group], *, rounds: int) -> list[Turn]:
    return [
        Turn(group=group, case=case, round=number)
        for group in groups
        for number in range(1, rounds + 1)
        for case in group.cases
    ]


def expected_s(turn: Turn, records: Sequence[Record]) -> float:
    """The longest time that the case took before; else its estimate."""
    took = [
        record["elapsed_s"]
        for record in records
        if (record["group"], record["case"]) == turn.key[:2] and "error" not in record
    ]
    return max(took) if took else turn.case.estimate_s


def walk(
    turns: Sequence[Turn],
    *,
    earlier: Sequence[Record],
    budget_s: float,
    run: Callable[[Turn, float], Record],
    clock: Callable[[], float],
    keep: Callable[[Record], None],
) -> list[Record]:
    """Every turn that is not done, did not fail and fits; its records after the earlier ones of the same groups.

    Errors of an earlier call are forgotten: it is this call that tries again.
    """
    groups = {turn.group.name for turn in turns}
    records = [record for record in earlier if record["group"] in groups and "error" not in record]
    done = {_key(record) for record in records}
    failed: set[str] = set()
    began_s = clock()
    for turn in turns:
        left_s, needed_s = budget_s - (clock() - began_s), expected_s(turn, records)
        if turn.key in done:
            continue
        if turn.name in failed or needed_s + START_MARGIN_S > left_s:
            why = "failed before" if turn.name in failed else f"about {needed_s:.0f} s, {max(left_s, 0):.0f} s left"
            print(f"         {turn.name} round {turn.round}: not started, {why}", flush=True)
            continue
        limit_s = min(left_s, max(3 * needed_s, LEAST_LIMIT_S))
        turn_began_s = clock()
        found = run(turn, limit_s)
        record = {"group": turn.group.name, "case": turn.case.name, "round": turn.round,
                  "elapsed_s": round(clock() - turn_began_s, 2), **found}  # fmt: skip
        keep(record)
        records.append(record)
        if "error" in record:
            failed.add(turn.name)
        print(f"{clock() - began_s:6.0f} s  {_progress(turn, record)}", flush=True)
    return records


def _key(record: Record) -> tuple[str, str, int]:
    return (record["group"], record["case"], record["round"])


def _progress(turn: Turn, record: Record) -> str:
    told = f"{turn.name} round {turn.round} ({record['elapsed_s']:.0f} s): "
    if "error" in record:
        return told + "FAILED: " + " ".join(record["error"].split())[-300:]
    gib = record["peak_allocated_bytes"] / 2**30
    return told + f"{record['tokens_per_s']:,.0f} tokens/s, {record['step_s'] * 1e3:.1f} ms, {gib:.1f} GiB"


# --- one process ----------------------------------------------------------------------------------------------------


class Runner:
    """Starts a turn's process and reads the one JSON object it prints."""

    def __init__(self, scratch: Path, *, tiny: bool) -> None:
        self._scratch, self._tiny = scratch, tiny
        scratch.mkdir(parents=True, exist_ok=True)

    def run(self, turn: Turn, limit_s: float) -> Record:
        process = subprocess.Popen(
            self.command(turn), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: only what was started here
            _, err = process.communicate()
            return {"error": f"no result in {limit_s:.0f} s", "stderr_tail": err[-2000:]}
        return answer_of(out, err, process.returncode)

    def command(self, turn: Turn) -> list[str]:
        group, case = turn.group, turn.case
        folder = self._scratch / group.name / case.name
        folder.mkdir(parents=True, exist_ok=True)
        if case.peer is not None:
            tiny = ["--tiny"] if self._tiny else []
            return [
                sys.executable, "benchmarks/gpu_peers.py", *case.peer, *self._model(group, case, folder),
                "--rows", str(group.rows), "--sequence", str(group.sequence), "--steps", str(group.steps),
                "--warmup", str(group.warmup), *tiny, "--json",
            ]  # fmt: skip
        run, plan = folder / "run.toml", folder / "plan.toml"
        run.write_text(tomli_w.dumps(run_tables(group, case, tiny=self._tiny)), encoding="utf-8")
        plan.write_text(tomli_w.dumps(plan_tables(case, tiny=self._tiny)), encoding="utf-8")
        return [
            sys.executable, "-m", "weft", "bench", "step", str(run), "--plan", str(plan), "--steps", str(group.steps),
            "--warmup", str(group.warmup), "--no-against", "--json",
        ]  # fmt: skip

    def _model(self, group: Group, case: Case, folder: Path) -> list[str]:
        """torchtitan has shapes, the others any HF config."""
        if case.peer is not None and "torchtitan" in case.peer:
            return ["--shape", group.shape]
        config = folder / "config.json"
        config.write_text(json.dumps(config_of(group, tiny=self._tiny)), encoding="utf-8")
        return ["--config-json", str(config)]


def environment() -> dict[str, str]:
    """The same for weft and its peers: this checkout, carried packages, the allocator that keeps fragments few."""
    carried = [str(ROOT / ".carry")] if (ROOT / ".carry").is_dir() else []
    path = [str(ROOT / "src"), *carried, *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**settings, **os.environ, "PYTHONPATH": os.pathsep.join(path)}


def answer_of(out: str, err: str, code: int) -> Record:
    """The last JSON object on stdout, on one line or many; without one, the end of stderr is the error."""
    for text in (out, *reversed(out.splitlines())):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found if code == 0 else {"error": _told_error(found, code), "stderr_tail": err[-2000:]}
    last = next((line for line in reversed(err.splitlines()) if line.strip()), "nothing was printed")
    return {"error": f"exit code {code}: {last[-500:]}", "stderr_tail": err[-2000:]}


def _told_error(found: dict[str, Any], code: int) -> str:
    """A peer's sentence, or weft's kind of error with its sentence."""
    told = [str(found[key]) for key in ("error", "code", "message") if found.get(key)]
    return ": ".join(told) or f"exit code {code}"


# --- files ----------------------------------------------------------------------------------------------------------


def read_records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def page_head(records: Sequence[Record], command: str) -> str:
    versions = sorted({f"{name} {value}" for record in records for name, value in record.get("versions", {}).items()})
    lines = [
        f"# Steps on one GPU, weft against its peers, {time.strftime('%Y-%m-%d')}",
        "",
        "Caveats first: one GPU, random weights and tokens, medians of a few steps. `fake8` is rank 0 of 8 whose",
        "collectives are copies in its own memory, on both sides: a rank's compute and memory, no network. There all",
        "ranks' shards are equal, so a loss says only that numbers are finite and moved. Both sides step AdamW and",
        "clip to 1.0 in every step.",
        "",
        f"Machine: {_gpu() or 'no GPU'}. Versions: {', '.join(versions) or 'unknown'}.",
        f"Command: `{command}`",
        "",
    ]
    return "\n".join(lines) + "\n"


def _gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    sys.exit(main())
