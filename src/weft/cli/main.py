"""The `weft` command: its verbs, and the place that turns errors into a sentence, a code, a hint and an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Annotated

import typer

from weft.cli.bench import bench_app
from weft.cli.comm.verbs import comm_app
from weft.cli.doctor import doctor
from weft.cli.dryrun.verb import dryrun
from weft.cli.export import export
from weft.cli.generate import generate
from weft.cli.groups import GroupedHelp, examples_of
from weft.cli.import_checkpoint import import_checkpoint
from weft.cli.inference import inference
from weft.cli.launch.verb import launch
from weft.cli.new import new
from weft.cli.plan.verb import plan
from weft.cli.profile import profile
from weft.cli.report import report
from weft.cli.schedule import schedule
from weft.cli.server import server_app
from weft.cli.train import train
from weft.cli.ui import ui
from weft.cli.verify import verify
from weft.core.disk import disk_full, is_full
from weft.core.errors import InputError, WeftError
from weft.train.ranks.environment import SCRATCH_VARIABLE, given_ranks

INTERRUPTED = 130
_INTERRUPT = InputError("interrupted", hint="no background process is left running")

app = typer.Typer(
    name="weft",
    help="Weave one model across many devices: plan it, dry-run it, train it, verify it, export it.",
    no_args_is_help=True,
    cls=GroupedHelp,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for verb in (new, plan, inference, schedule, dryrun, train, verify, export, generate, report, profile, ui, doctor):
    context = {"allow_extra_args": True} if verb is verify else None  # arguments of a script
    app.command(epilog=examples_of(verb.__name__), context_settings=context)(verb)
app.command("import", epilog=examples_of("import"))(import_checkpoint)
app.add_typer(bench_app)
app.add_typer(comm_app)
app.add_typer(server_app)
app.command(  # options after the verb are the verb's
    context_settings={"allow_interspersed_args": False}, epilog=examples_of("launch")
)(launch)


def _show_version(wanted: bool) -> None:
    if wanted:
        import weft

        print(f"weft {weft.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Weave one model across many devices: plan it, dry-run it, train it, verify it, export it."""


def main() -> None:
    """Run a verb. Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 a failure while running."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # the option parser turned Ctrl-C into an exit code
            report_error(_INTERRUPT)
    except WeftError as error:
        code = report_error(error)
    except KeyboardInterrupt:
        code = report_error(_INTERRUPT) and INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # no verb was given: print the help
            print(error.format_message())  # type: ignore[attr-defined]
            code = 0
        elif not hasattr(error, "format_message"):
            code = _report_unexpected(error)
        else:  # a usage error of the option parser, whichever library provides it
            code = report_error(
                InputError(error.format_message(), hint="weft --help, or weft VERB --help, lists verbs and options")
            )
    sys.exit(code if isinstance(code, int) else 0)


def report_error(error: WeftError) -> int:
    """Print the error on stderr, and as JSON on stdout with --json; returns the exit code.

    A rank of weft's launcher records it instead: the launcher prints one error of all ranks.
    """
    if SCRATCH_VARIABLE in os.environ and given_ranks(os.environ) is not None:
        from weft.train.ranks.failures import report_before_joining

        report_before_joining(error)
        return error.exit_code
    if "--json" in sys.argv:
        print(json.dumps(error.as_dict()))
    print(f"error [{error.code}]: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code


def _report_unexpected(error: Exception) -> int:
    """Print an unexpected error (a bug of weft or a library): one line, and the stack trace with WEFT_DEBUG=1."""
    if os.environ.get("WEFT_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, OSError) and is_full(error):
        return report_error(disk_full(error))
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    failure = WeftError(f"{type(error).__name__}: {first}", hint="this is a bug; WEFT_DEBUG=1 shows the stack trace")
    return report_error(failure)


if __name__ == "__main__":
    main()
