"""`weft verify` of combinations that nobody listed: each is drawn from a seed, resolved, then verified on CPU ranks.

    python benchmarks/verify_drawn.py --seeds 0 200 --out drawn.jsonl [--limit-s 3600]

A draw that is refused is refused before ranks start, and its hint is followed until it is legal or the hint names no
setting. Outcomes: green, refused, or a finding: a wrong verdict, another exception, a refusal by the ranks, a hint that
does not lift its own refusal, an end beyond the limit. Lines of --out that exist are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tomli_w

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from drawn import Case, draw_case  # noqa: E402
from drawn_settled import Settled, settle, steps_of  # noqa: E402
from gloo import RankFailureError, preload, run_ranks  # noqa: E402
from tiny_run import write_corpus  # noqa: E402
from verify_ranks import verdict_in_rank  # noqa: E402

from weft.verify.session import STAGES  # noqa: E402

LIMIT_S = 900.0
_WORDS = ("warp", "weft", "loom", "shuttle", "thread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--seeds", type=int, nargs=2, default=[0, 100], help="the first seed, and the one after the last"
    )
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON per seed")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="no combination begins after this time")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="ranks forked from one warm process, not commands: faster")
    parser.add_argument("--without", nargs="*", default=[], help="leave out draws with these features, such as compile")
    parser.add_argument("--most-ranks", type=int, default=4, help="leave out draws of more ranks")
    given = parser.parse_args()
    preload("verify_ranks", "weft.verify.session")
    done = {line["seed"] for line in read_lines(given.out)}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drawn-") as folder:
        corpus, chats = write_data(Path(folder))
        for seed in (one for one in range(*given.seeds) if one not in done):
            if time.monotonic() - began_s > given.limit_s:
                break
            case = draw_case(seed, corpus, chats)
            if set(case.features) & set(given.without) or case.num_ranks > given.most_ranks:
                continue
            line = judge(case, Path(folder), steps=given.steps, is_warm=given.warm)
            with given.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            print(f"{seed}: {line['outcome']}: {line.get('detail', '')}"[:300], file=sys.stderr, flush=True)
    lines = read_lines(given.out)
    print(json.dumps(Counter(line["outcome"] for line in lines)))
    raise SystemExit(1 if any(line["outcome"] == "finding" for line in lines) else 0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write_data(folder: Path) -> tuple[str, str]:
    """A folder of texts and a file of prompts with completions."""
    draw, chats = random.Random(1), folder / "chats.jsonl"
    texts = (
        {key: " ".join(draw.choices(_WORDS, k=draw.randint(1, 9))) for key in ("prompt", "completion")}
        for _ in range(400)
    )
    chats.write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    return str(write_corpus(folder / "corpus")), str(chats)


def judge(case: Case, folder: Path, *, steps: int, is_warm: bool) -> dict[str, Any]:
    """The outcome of a case: refusals that its hints lead through, then the verdict."""
    began_s = time.monotonic()
    line: dict[str, Any] = {"seed": case.seed, "features": case.features, "ranks": case.num_ranks}
    try:
        settled = settle(case)
    except Exception as error:
        settled = Settled(None, (), f"{type(error).__name__}: {error}")
    line["refusals"] = [refusal.as_dict() for refusal in settled.refusals]
    if settled.wrong:
        line |= {"outcome": "finding", "detail": settled.wrong}
    elif settled.legal is None:
        line |= {"outcome": "refused", "detail": settled.refusals[-1].message}
    else:
        line |= {"run": settled.legal.run, "plan": settled.legal.plan}
        line |= (forked if is_warm else commanded)(settled.legal, folder, steps=steps_of(settled.legal, steps))
    if line["outcome"] == "finding":
        line["drawn"] = {"run": case.run, "plan": case.plan}
    return {**line, "elapsed_s": round(time.monotonic() - began_s, 1)}


def commanded(case: Case, folder: Path, *, steps: int) -> dict[str, Any]:
    """`weft verify` as a command: of the model as it is, or shrunk, by the seed."""
    run, plan = folder / "run.toml", folder / "plan.toml"
    run.write_text(tomli_w.dumps(case.run), encoding="utf-8")
    plan.write_text(tomli_w.dumps(case.plan), encoding="utf-8")
    command = [sys.executable, "-m", "weft", "verify", str(run), "--plan", str(plan), "--json", "--device", "cpu"]
    command += ["--steps", str(steps), *(["--as-is"] if case.seed % 2 else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"outcome": "finding", "detail": f"no end within {LIMIT_S:.0f} s"}
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return {"outcome": "finding", "detail": f"exit {done.returncode}: {done.stderr.strip()[-600:]}"}
    if "checks" not in answer:
        return {"outcome": "finding", "detail": f"refused by ranks: {answer['message']} hint: {answer['hint']}"}
    return judged(answer)


def forked(case: Case, folder: Path, *, steps: int) -> dict[str, Any]:
    """The ranks of `weft verify --as-is`, forked from a process that has imported them; every fourth seed all stages,
    the others the first: losses, gradients, weights, states."""
    stages = STAGES if case.seed % 4 == 0 else STAGES[:1]
    arguments = (case.run, case.plan, str(folder / str(case.seed)), steps, list(stages))
    try:
        return judged(run_ranks(verdict_in_rank, case.num_ranks, *arguments, timeout_s=LIMIT_S)[0])
    except RankFailureError as failure:
        return {"outcome": "finding", "detail": str(failure)[-1500:]}


def judged(answer: dict[str, Any]) -> dict[str, Any]:
    wrong = [f"{check['name']}: {check['detail']}" for check in answer["checks"] if not check["ok"]]
    margins = [check["margin"] for check in answer["checks"] if check.get("margin")]
    named = {"name": answer["plan"], "checks": len(answer["checks"]), "margin": round(max(margins, default=0.0), 4)}
    return {**named, "outcome": "finding" if wrong else "green", "detail": "; ".join(wrong)}


if __name__ == "__main__":
    main()
