"""`weft comm`: what is refused in one sentence, what explain prints, what a bench shows and writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.cli.comm.verbs import _show
from weft.cli.comm.view import text_of
from weft.cli.main import app
from weft.core.errors import DeviceError, InputError
from weft.hardware import cluster
from weft.hardware.calibration import with_link
from weft.report.comm import write_comm_page

ROW: dict[str, Any] = {
    "collective": "all_reduce", "algorithm": "ring", "ranks": 4, "bytes": 2**20, "seconds": 1e-3,
    "algorithm_bytes_per_s": 1e9, "bus_bytes_per_s": 1.5e9, "bytes_sent_per_rank": 3 * 2**19,
    "predicted_bytes_per_rank": 3 * 2**19, "equal": True,
}  # fmt: skip
ROWS = [ROW, {**ROW, "bytes": 2**24, "seconds": 2e-2}, {**ROW, "algorithm": "backend", "bytes_sent_per_rank": None}]
ANSWER: dict[str, Any] = {
    "rows": ROWS, "fit": {"alpha_s": 2e-5, "beta_s_per_byte": 5e-10}, "machine": "4 x CPU", "link": "loopback",
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["explain", "all_sum"], "all_sum"),
        (["explain", "all_reduce", "--algorithm", "rings"], "rings"),
        (["explain", "broadcast", "--algorithm", "ring"], "algorithm of broadcast"),
        (
            ["explain", "all_reduce", "--algorithm", "hierarchical", "--ranks", "6", "--per-node", "4"],
            "do not divide 6",
        ),
        (["bench", "--collective", "gather,all_sum"], "all_sum"),
        (["bench", "--algorithm", "rings"], "rings"),
        (["bench", "--sizes", "1MiB,big"], "big"),
        (["bench", "--sizes", "0"], "at least 1 byte"),
        (["bench", "--dtype", "float4"], "float4"),
        (["bench", "--link", "string"], "string"),
        (["bench", "--algorithm", "hierarchical", "--per-node", "2", "--nproc", "3"], "does not divide 3"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options: list[str], word: str) -> None:
    found = CliRunner().invoke(app, ["comm", *options])
    assert isinstance(found.exception, InputError), found.output
    assert word in found.exception.message
    assert found.exception.hint
    assert found.exception.exit_code == 2


def test_explain_prints_rounds_as_text_and_as_json() -> None:
    text = CliRunner().invoke(app, ["comm", "explain", "all_reduce", "--ranks", "3"])
    assert "step 4:" in text.output
    assert "step 5:" not in text.output
    answer = json.loads(CliRunner().invoke(app, ["comm", "explain", "all_reduce", "--ranks", "3", "--json"]).output)
    assert answer["algorithm"] == "ring"
    assert len(answer["rounds"]) == 4
    assert all(len(one["messages"]) == 3 for one in answer["rounds"])


def test_the_table_and_the_picture_show_every_row(tmp_path: Path) -> None:
    text = text_of(ANSWER)
    assert "latency 0.02 ms, 2 GB/s" in text
    assert "R ring, B backend" in text
    assert text.count("ring ") >= 2
    assert "1.50" in text
    page = write_comm_page(ANSWER, tmp_path / "comm.html").read_text(encoding="utf-8")
    assert "1,572,864" in page
    assert "all_reduce-time" in page


def test_times_that_do_not_grow_give_no_bandwidth(tmp_path: Path) -> None:
    flat = {**ANSWER, "fit": {"alpha_s": 1e-3, "beta_s_per_byte": 0.0}}
    assert "bandwidth unknown" in text_of(flat)
    with pytest.raises(InputError, match="do not grow"):
        _show(flat, calibrate=tmp_path / "mine.toml", link=None, out=None, as_json=True)
    assert not (tmp_path / "mine.toml").exists()


def test_figures_of_a_link_become_the_planner_s(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[devices.CPU]\nmemory_share = 0.5\n[links.loopback]\nduplex_share = 0.5\n", encoding="utf-8")
    path.write_text(with_link(path, "LOOPBACK", {"latency_s": 2e-5, "bytes_per_s": 2e9}, measured="today"), "utf-8")
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    assert tables["links"]["loopback"] == {"duplex_share": 0.5, "latency_s": 2e-5, "bytes_per_s": 2e9}
    found = cluster("4xCPU", calibration=path)
    assert (found.inside.latency_s, found.inside.bytes_per_s, found.device.memory_share) == (2e-5, 2e9, 0.5)
    with pytest.raises(DeviceError):
        with_link(path, "string", {}, measured="")
