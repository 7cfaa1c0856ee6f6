"""`weft verify`: compare a plan with a one-process reference. Exit 0 when they agree, 1 when not."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import DeviceChoice, NumRanks, RunFile, Settings
from weft.core.errors import BadValueError

if TYPE_CHECKING:  # imported inside the verb, to keep `weft --help` fast
    from weft.verify.request import VerifyRequest
    from weft.verify.verdict import Verdict


def verify(
    context: typer.Context,
    run: RunFile = None,
    plan: Annotated[Path | None, typer.Option(help="plan.toml: the layout to verify.")] = None,
    nproc: NumRanks = None,
    steps: Annotated[int, typer.Option(min=2, help="Training steps compared.")] = 5,
    as_is: Annotated[bool, typer.Option("--as-is", help="Do not shrink the model, the rows or the batch.")] = False,
    all_plans: Annotated[bool, typer.Option("--all", help="Verify every legal plan of this number of ranks.")] = False,
    matrix: Annotated[Path | None, typer.Option(help="The HTML file that --all writes.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="A training script of your own; its arguments follow --.", show_default=False)
    ] = None,
    settings: Settings = None,
    device: Annotated[
        DeviceChoice, typer.Option(help="Where to verify; auto takes GPUs where there are enough.")
    ] = DeviceChoice.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout.")] = False,
) -> None:
    """Compare a plan's losses, gradients, norms, weights, resume and export with a one-process reference.

    A run.toml with a [server] table is verified on parameter servers: every optimizer, mode and layout. --script
    compares a torch or accelerate script on --nproc ranks with the same script on one process."""
    if script is not None:
        arguments = [*([str(run)] if run is not None else []), *context.args]
        unused = {"--plan": plan, "--all": all_plans or None, "--set": settings or None, "--matrix": matrix}
        _verify_script(script, arguments, nproc=nproc, steps=steps, as_json=as_json, unused=unused)
    if context.args:
        raise BadValueError(f"unexpected argument {context.args[0]!r}", hint="arguments after -- are for --script")
    if run is not None and _is_server_run(run):
        _verify_server(
            run, steps=steps, as_is=as_is, settings=settings or [], as_json=as_json, not_for_servers=(plan, nproc)
        )
    from weft.cli.resolve import plan_tables, require_known_sections, resolve_run
    from weft.core.plan import Plan
    from weft.plan.legality import require_legal
    from weft.plan.resolve import resolve
    from weft.train.devices import choose_device_type, num_gpus
    from weft.verify.layouts import plan_name
    from weft.verify.refusals import require_comparable, require_enough_steps
    from weft.verify.request import VerifyRequest, judged_plans
    from weft.verify.verdict import VerdictTable

    given = settings or []
    require_known_sections(given)
    spec, source = resolve_run(run, given), str(plan or "the plan")
    tables = plan_tables(plan, given)
    num_ranks = nproc or Plan.from_tables(tables, source=source).num_ranks
    has_too_few = device is DeviceChoice.AUTO and num_gpus() < num_ranks  # then CPU processes
    device_type = choose_device_type("cpu" if has_too_few else device.value, local_ranks=num_ranks)
    resolved = resolve(tables, spec, on_gpu=device_type == "cuda", num_ranks=nproc, source=source)
    judged = list(judged_plans(num_ranks, tables, spec)) if all_plans else [(resolved, None)]
    plans = [one for one, reason in judged if reason is None]
    for legal in plans:
        require_legal(legal, spec)  # before any rank starts
    if not all_plans:  # one of many is left out
        require_enough_steps(resolved, steps=steps)
    require_comparable(spec)
    for one, reason in judged:
        if reason is not None:
            print(f"{plan_name(one)}: left out: {reason}", file=sys.stderr)
    request = VerifyRequest(run=spec, plans=plans, steps=steps, as_is=as_is, device=device_type)
    verdicts = _run_ranks(request)
    answer = VerdictTable(run=str(run or "the embedded default"), verdicts=tuple(verdicts))
    _print_answer(answer, is_matrix=all_plans, as_json=as_json)
    if all_plans and matrix is not None:
        from weft.report.matrix import write_matrix

        write_matrix(answer.as_dict(), matrix)
        print(f"open {matrix}", file=sys.stderr)
    raise typer.Exit(code=0 if answer.ok else 1)


def _verify_script(
    script: Path, arguments: list[str], *, nproc: int | None, steps: int, as_json: bool, unused: dict[str, Any]
) -> None:
    from weft.cli.verify_script import ScriptRequest, verify_script

    for option, value in unused.items():
        if value is not None:
            raise BadValueError(
                f"{option} does not apply to --script", hint="leave it out: the script has its own layout"
            )
    request = ScriptRequest(script=script, arguments=arguments, num_ranks=nproc or 2, steps=steps)
    verdict = verify_script(request)
    for change in verdict.changes:
        print(f"changed: {change}", file=sys.stderr)
    print(verdict.text(), file=sys.stderr)
    if as_json:
        print(json.dumps(verdict.as_dict()))
    raise typer.Exit(code=0 if verdict.ok else 1)


def _is_server_run(path: Path) -> bool:
    from weft.core.config import read_toml

    return "server" in read_toml(path)


def _verify_server(
    path: Path, *, steps: int, as_is: bool, settings: list[str], as_json: bool, not_for_servers: tuple[Any, ...]
) -> None:
    from weft.cli.server import resolve
    from weft.core.extras import require_extra

    if any(given is not None for given in not_for_servers):
        raise BadValueError(
            "--plan and --nproc do not apply: this run.toml is for parameter servers",
            hint="leave them out: every layout of workers and servers is verified",
        )
    spec = resolve(path, settings)
    require_extra("numba")
    from weft.verify.server import verify_server

    verdict = verify_server(spec, steps=steps, as_is=as_is)
    print(verdict.text(), file=sys.stderr)
    if as_json:
        print(json.dumps(verdict.as_dict()))
    raise typer.Exit(code=0 if verdict.ok else 1)


def _run_ranks(request: VerifyRequest) -> list[Verdict]:
    import dataclasses

    from weft.core.quiet import quiet_libraries
    from weft.launch.local import launch
    from weft.verify.verdict import Verdict

    quiet_libraries()
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers shows a bar per reload
    with tempfile.TemporaryDirectory(prefix="weft-") as scratch:
        answer = Path(scratch) / "verdicts.json"
        request_path = Path(scratch) / "request.json"
        request_path.write_text(dataclasses.replace(request, answer=str(answer)).to_json(), encoding="utf-8")
        command = [sys.executable, "-m", "weft.verify", str(request_path)]
        num_ranks = request.plans[0].num_ranks
        launch(command, num_ranks=num_ranks, scratch=Path(scratch), imports=["weft.verify.worker"])
        fields: list[dict[str, Any]] = json.loads(answer.read_text(encoding="utf-8"))
    return [Verdict.from_dict(verdict) for verdict in fields]


def _print_answer(answer: Any, *, is_matrix: bool, as_json: bool) -> None:
    for verdict in answer.verdicts:
        print(verdict.text(), file=sys.stderr)
    if is_matrix:
        passed = sum(verdict.ok for verdict in answer.verdicts)
        print(f"{passed} of {len(answer.verdicts)} plans pass", file=sys.stderr)
    if as_json:
        print(json.dumps(answer.as_dict() if is_matrix else answer.verdicts[0].as_dict()))
