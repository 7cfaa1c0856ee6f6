"""The server of the page, asked over its real socket: data, pages, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.ui.page_data import PageData
from weft.ui.server import PageServer


class Site:
    """A server over `folder`, and requests to it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.answers = folder, PageData(folder, cache)
        self.server = PageServer(self.answers)
        self.cookie = f"{self.server.cookie}={self.server.token}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        given = {"Host": f"127.0.0.1:{self.server.port}", "Cookie": self.cookie, **headers}
        connection.request(method, path, headers=given)
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, text, reply.headers

    def data(self, path: str) -> Any:
        status, text, _ = self.ask(path)
        assert status == 200, text
        return json.loads(text)

    def read_all(self) -> None:
        self.data("/api/runs")
        while self.answers.indexer.update_all():
            pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    write_run(tmp_path / "runs" / "first", steps=3000)
    write_run(tmp_path / "runs" / "sweep" / "b&c <i>", steps=20)
    (tmp_path / "runs" / "secret.txt").write_text("secret")
    (tmp_path / "outside").mkdir()
    write_run(tmp_path / "outside" / "run", steps=3)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    made = Site(tmp_path / "runs", tmp_path / "cache")
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.answers.indexer.close()


def write_run(path: Path, *, steps: int) -> None:
    path.mkdir(parents=True)
    lines = [{"step": step, "loss": 5 / step, "tokens": 100, "step_s": 0.1} for step in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "run.toml").write_text(RunSpec.default().to_toml())
    (path / "plan.toml").write_text(Plan.from_tables({"mesh": {"dp_shard": 2}}).to_toml())


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_table_and_the_curves(site: Site) -> None:
    before = files_of(site.folder)
    site.read_all()
    table = site.data("/api/runs")
    assert [run["name"] for run in table["runs"]] == ["first", "sweep/b&c <i>"]
    first = table["runs"][0]
    assert (first["step"], first["steps"], first["model"], first["status"]) == (3000, 200, "llama", "unknown")
    assert first["plan"] == "ZeRO-3 (FSDP)"
    assert {"loss", "step_s"} <= set(first["fields"])
    query = f"run=first&run={quote('sweep/b&c <i>')}&field=loss&width=100"
    long, short = site.data(f"/api/curves?{query}")["curves"]
    assert 100 < len(long["x"]) <= 202
    assert (long["x"][0], long["y"][0], long["x"][-1]) == (1, 5, 3000)
    assert len(long["mean_x"]) == 100
    assert short["x"] == list(range(1, 21))
    by_tokens = site.data("/api/curves?run=first&x=tokens&width=100")["curves"][0]
    assert by_tokens["x"][-1] == 300_000
    zoomed = site.data("/api/curves?run=first&low=1000&high=1050&width=100")["curves"][0]
    assert zoomed["x"] == list(range(999, 1052))
    assert files_of(site.folder) == before


def test_a_running_training_grows_on_the_page(site: Site) -> None:
    site.read_all()
    run = site.folder / "first"
    (run / "run.lock").write_text(json.dumps({"pid": os.getpid()}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3001, "loss": 0.5, "tokens": 100}) + "\n")
    site.read_all()
    row = site.data("/api/runs")["runs"][0]
    assert (row["status"], row["step"], row["loss"]) == ("running", 3001, 0.5)
    assert site.data("/api/curves?run=first&width=100")["curves"][0]["x"][-1] == 3001


def test_the_page_and_the_report(site: Site) -> None:
    before = files_of(site.folder)
    for path, part in {"/": "<title>weft</title>", "/page.js": "weft ui", "/plotly.js": "plotly.js v"}.items():
        status, text, headers = site.ask(path)
        assert status == 200
        assert part in text
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "http://" not in text or path == "/plotly.js"
    status, text, _ = site.ask(f"/report?run={quote('sweep/b&c <i>')}")
    assert status == 200
    assert "20 of 200 steps" in text
    assert files_of(site.folder) == before


@pytest.mark.parametrize(
    "name", ["../outside/run", "link/run", "..", "", "/etc", "first/../first", "nothing", "secret.txt"]
)
def test_a_name_that_is_no_run_of_the_list_is_refused(site: Site, name: str) -> None:
    for path in (f"/report?run={quote(name)}", f"/api/curves?run={quote(name)}&run=first"):
        status, text, _ = site.ask(path)
        assert status == 400, path
        assert "there is no run" in json.loads(text)["message"] or "field" in path
    for path in (f"/{quote(name)}", f"/../{name}", f"/page/{quote(name)}"):
        assert "secret" not in site.ask(path)[1]


def test_without_the_token_nothing_is_answered(site: Site) -> None:
    for path in ("/", "/api/runs", "/page.js", "/report?run=first", "/style.css"):
        for cookie in ("", f"{site.server.cookie}=wrong", "other=1", "=;;"):
            status, text, _ = site.ask(path, Cookie=cookie)
            assert status == 403
            assert "first" not in text
    assert site.ask("/?token=wrong", Cookie="")[0] == 403
    status, _, headers = site.ask(f"/?token={site.server.token}", Cookie="")
    assert (status, headers["Location"]) == (303, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]


def test_another_host_name_or_method_is_refused(site: Site) -> None:
    for host in ("evil.example", f"evil.example:{site.server.port}", "127.0.0.1", "127.0.0.1:1"):
        assert site.ask("/api/runs", Host=host)[0] == 421
    assert site.ask("/api/runs", Host=f"localhost:{site.server.port}")[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert site.ask("/api/runs", method=method)[0] == 501
    assert site.server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("query", "told"),
    [("field=nothing", "there is no field"), ("x=weight", "there is no x"), ("width=wide", "width is not a number")],
)
def test_a_bad_question_is_one_sentence(site: Site, query: str, told: str) -> None:
    status, text, _ = site.ask(f"/api/curves?run=first&{query}")
    assert status == 400
    assert told in json.loads(text)["message"]
    assert json.loads(text)["hint"]


def test_the_explorer_answers_as_the_planner_does(site: Site) -> None:
    import weft

    workload = "model=llama-3-8b&devices=8xH100-80GB&global_batch=16&sequence_length=4096"
    found = site.data(f"/api/plan?{workload}&tp=2&zero=3&precision=bf16")
    plan = weft.Plan.from_tables(
        {"mesh": {"dp_shard": 4, "tp": 2}, "data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}}
    )
    right = weft.estimate("llama-3-8b", plan, "8xH100-80GB", global_batch=16, sequence_length=4096)
    assert (found["memory_bytes"], found["step_s"]) == (right.memory_bytes, right.step_s)
    assert sum(found["memory_terms"].values()) == right.memory_bytes
    refused = site.data("/api/plan?model=llama-3-8b&devices=8xH100-80GB&tp=16&zero=3")
    assert refused["code"] == "W202"
    assert site.data("/api/plan?model=nothing&devices=8xH100-80GB")["hint"]
    best = site.data("/api/best?model=llama-3-8b&devices=8xH100-80GB&global_batch=64&sequence_length=4096")
    assert best["fits"]
    sliders = urlencode({**best["sliders"], "base": json.dumps(best["base"])})
    again = site.data(f"/api/plan?model=llama-3-8b&devices=8xH100-80GB&global_batch=64&sequence_length=4096&{sliders}")
    assert again["memory_bytes"] == best["memory_bytes"]
    assert again["plan_toml"] == best["plan_toml"]
    assert "base is not a plan" in site.data(f"/api/plan?{workload}&base=[1]")["message"]


def test_a_second_page_on_the_same_cache_keeps_its_own(site: Site, tmp_path: Path) -> None:
    second = Site(site.folder, tmp_path / "cache")
    for one in (site, second):
        one.read_all()
        assert one.data("/api/curves?run=first&width=100")["curves"][0]["rows"] == 3000
    second.server.shutdown()
    second.server.server_close()
    second.answers.indexer.close()


def test_the_command_ends_at_once_with_ctrl_c(site: Site, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft", "ui", str(site.folder), "--no-browser"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "other")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("open http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["nowhere"], "there is no folder nowhere"), ([".", "--port", "{used}"], "cannot be used")],
)
def test_bad_input_is_one_sentence(site: Site, tmp_path: Path, arguments: list[str], told: str) -> None:
    given = [one.format(used=site.server.port) for one in arguments]
    command = [sys.executable, "-m", "weft", "ui", *given, "--no-browser"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert "hint: " in done.stderr
    assert len(done.stderr.splitlines()) == 2
