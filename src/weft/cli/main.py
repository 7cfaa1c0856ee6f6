"""The `weft` command: its verbs, and the one place where errors become a sentence, a code, a hint and an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Annotated

import typer

from weft.cli.bench import bench_app
from weft.cli.dryrun import dryrun
from weft.cli.export import export
from weft.cli.plan import plan
from weft.cli.report import report
from weft.cli.server import server_app
from weft.cli.train import train
from weft.cli.verify import verify
from weft.core.disk import disk_full, is_full
from weft.core.errors import InputError, WeftError

INTERRUPTED = 130

app = typer.Typer(
    name="weft",
    help="Weave one model across many devices: plan it, dry-run it, train it, prove it, export it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(plan)
app.command()(dryrun)
app.command()(train)
app.command()(verify)
app.command()(export)
app.command()(report)
app.add_typer(bench_app)
app.add_typer(server_app)


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
    """Weave one model across many devices: plan it, dry-run it, train it, prove it, export it."""


def main() -> None:
    """Run a verb. Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 a failure while running."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # the option parser has made an exit code of Ctrl-C
            tell(InputError("interrupted", hint="nothing goes on in the background"))
    except WeftError as error:
        code = tell(error)
    except KeyboardInterrupt:
        code = tell(InputError("interrupted", hint="nothing goes on in the background")) and INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help was asked for by saying nothing else
            print(error.format_message())  # type: ignore[attr-defined]
            code = 0
        elif not hasattr(error, "format_message"):
            code = _tell_unforeseen(error)
        else:  # a usage error of the option parser, whichever library provides it
            code = tell(
                InputError(error.format_message(), hint="weft --help, or weft VERB --help, lists what is possible")
            )
    sys.exit(code if isinstance(code, int) else 0)


def tell(error: WeftError) -> int:
    """The error on stderr for people, on stdout as JSON when --json was given."""
    if "--json" in sys.argv:
        print(json.dumps(error.as_dict()))
    print(f"error [{error.code}]: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code


def _tell_unforeseen(error: Exception) -> int:
    """A defect of weft or a library: one line, and the trace only for who asks."""
    if os.environ.get("WEFT_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, OSError) and is_full(error):
        return tell(disk_full(error))
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    failure = WeftError(
        f"{type(error).__name__}: {first}", hint="this was not foreseen; WEFT_DEBUG=1 shows the stack trace"
    )
    return tell(failure)


if __name__ == "__main__":
    main()
