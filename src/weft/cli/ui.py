"""`weft ui`: the local page over a folder of runs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer


def ui(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, or one run.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 takes a free one.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address; open no browser.")] = False,
) -> None:
    """Watch and compare runs in the browser: live curves, memory, pipelines, experts, and a plan explorer.

    The page is on this machine only, needs no network, and changes nothing in the runs. Ctrl-C ends it.
    """
    import os
    import threading

    from weft.ui.runs import require_folder

    require_folder(folder)
    from weft.ui.page_data import PageData
    from weft.ui.server import PageServer

    base = os.environ.get("XDG_CACHE_HOME")
    answers = PageData(folder, (Path(base) if base else Path.home() / ".cache") / "weft" / "ui")
    server = PageServer(answers, port=port)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Thread(target=answers.prepare, name="first curves", daemon=True).start()
        answers.indexer.start()
        print(f"open {server.url}", file=sys.stderr, flush=True)
        if not no_browser:
            _open(server.url)
        server.serve_forever(poll_interval=0.1)
    answers.indexer.close()


def _open(url: str) -> None:
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # some browsers block their caller
