"""The example notebook runs in a Jupyter kernel, ranks that it starts included."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from blocks import ROOT
from nbclient import NotebookClient


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", os.pathsep.join([str(ROOT / ".venv" / "bin"), os.environ["PATH"]]))
    notebook = nbformat.read(ROOT / "examples" / "notebook" / "weft.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        "".join(out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", ())) for cell in notebook.cells
    ]
    assert any(text.startswith("('stopped', 5, ") for text in shown), shown
    assert shown[-1].endswith("('finished', 5)"), shown[-1]
