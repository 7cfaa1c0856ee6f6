"""The page of a run on parameter servers, drawn from plain JSON: sections, gaps, runs beside each other, escaping."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.cli.main import app
from weft.core.errors import RunFolderError
from weft.core.server_spec import ServerRun
from weft.report import page as pages
from weft.report import write_report
from weft.report.folder import is_server_run, read_server_folder, train_seconds

EVIL = "</script><script>alert('weft')</script>\"><img src=x onerror=alert(1)>"
SECTIONS = ("curves", "staleness", "servers", "workers", "hot-keys", "events", "documents", "environment")


def make_steps(num_steps: int = 60, *, step_s: float = 0.02, lift: float = 0.0) -> list[dict[str, Any]]:
    steps = []
    for step in range(1, num_steps + 1):
        fields = {
            "step": step,
            "loss": 0.7 - 0.002 * step + 0.01 * (step % 3) - lift,
            "samples": 128,
            "step_s": step_s,
            "samples_per_s": 128 / step_s,
            "learning_rate": 0.02,
            "staleness_mean": 1.0 + step % 2,
            "wait_s": 0.004,
        }
        is_evaluated = step % 20 == 0
        steps.append(
            {**fields, "eval_loss": 0.72 - 0.002 * step, "auc": 0.6 + 0.002 * step} if is_evaluated else fields
        )
    return steps


def make_server(index: int, *, rows: int) -> dict[str, Any]:
    tables = [{"name": "embedding", "rows": rows, "bytes": 100 * rows}, {"name": "dense", "rows": 4, "bytes": 65_536}]
    return {
        "index": index,
        "tables": tables,
        "units": 180,
        "pulls": 190,
        "pushes": 181,
        "repeated": 1,
        "up_s": 12.0,
        "staleness": {"0": 60, "1": 100, "7": 20},
        "rows": rows + 4,
        "bytes": 100 * rows + 65_536,
        "pulled_rows_per_s": 10.0 * rows,
        "pushed_rows_per_s": 8.0 * rows,
        "load": 0.25 + 0.1 * index,
    }


def make_figures() -> dict[str, Any]:
    return {
        "servers": [make_server(0, rows=1_000), make_server(1, rows=3_000)],
        "workers": [
            {"name": "worker 0", "units": 60, "compute_s": 1.2, "wait_s": 1.0},
            {"name": "worker 1", "units": 60, "compute_s": 2.4, "wait_s": 0.2},
            {"name": "worker 2", "units": 60, "compute_s": 1.2, "wait_s": 1.0},
        ],
        "staleness": {"0": 120, "1": 200, "7": 40},
        "hot_keys": {"embedding": [[-6893182575793277493, 180], [42, 90]]},
        "evaluations": [{"step": 20, "loss": 9.0, "auc": 0.1}, {"step": 30, "loss": 0.65, "auc": 0.66}],
        "timeline": [],
        "events": [
            {"time": 1_800_000_000.0, "event": "server up", "who": "1"},
            {"time": 1_800_000_000.1, "event": "worker joined", "who": "worker 2"},
            {"time": 1_800_000_003.0, "event": "server lost", "who": "1"},
            {"time": 1_800_000_004.5, "event": "server up", "who": "1"},
            {"time": 1_800_000_005.0, "event": "silent", "who": "worker 2"},
        ],
    }


def make_ledger() -> dict[str, Any]:
    run = {"status": "done", "steps": 60, "samples_per_s": 6400.0, "train_s": 1.2, "elapsed_s": 3.5, "mode": "async"}
    machine = {"platform": "Linux-6.1", "python": "3.12.9"}
    return {"kind": "server", "run": run, "rows": 4_008, "bytes": 531_072, "restarts": 1, "machine": machine}


def run_text(mode: str = "async", **server: Any) -> str:
    chosen = {"servers": 2, "workers": 3, "mode": mode, "staleness": 2, "launcher": "in_process", **server}
    return ServerRun.from_tables({"train": {"steps": 60}, "server": chosen}).to_toml()


def write_run(folder: Path, **files: Any) -> Path:
    """A finished run; keywords replace a file's content or, with None, leave it out."""
    whole = {"steps": make_steps(), "server": make_figures(), "ledger": make_ledger(), "run": run_text(), **files}
    folder.mkdir(parents=True, exist_ok=True)
    steps = whole["steps"]
    texts = {
        "metrics.jsonl": None if steps is None else "".join(json.dumps(step) + "\n" for step in steps),
        "server.json": None if whole["server"] is None else json.dumps(whole["server"]),
        "ledger.json": None if whole["ledger"] is None else json.dumps(whole["ledger"]),
        "run.toml": whole["run"],
    }
    for name, content in texts.items():
        if content is not None:
            (folder / name).write_text(content, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _short_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_page has plotly in its pages; a megabyte in each of these would only cost time."""
    monkeypatch.setattr(pages, "_plotly_script", lambda: "/* plotly */")


@pytest.fixture(scope="module")
def whole_pages() -> dict[str, Any]:
    return {}


@pytest.fixture
def drawn(tmp_path: Path, page_of: Callable[[Path], Any], whole_pages: dict[str, Any]) -> Callable[..., Any]:
    """Writes a run, draws it, and takes the page apart; the page of the whole run once for all tests."""

    def draw(**files: Any) -> Any:
        if not files and whole_pages:
            return whole_pages["whole"]
        page = page_of(write_report(write_run(tmp_path / "run", **files)))
        return page if files else whole_pages.setdefault("whole", page)

    return draw


def ids(page: Any) -> set[str]:
    return {value for tag, name, value in page.attributes if (tag, name) == ("section", "id")}


def test_every_section_is_there_with_its_figures(drawn: Any) -> None:
    page = drawn()
    assert ids(page) == set(SECTIONS)
    one_run = {"loss", "auc", "throughput", "staleness-steps", "waiting"}
    loads = {"servers-moved", "servers-busy", "servers-rows", "servers-bytes", "workers", "hot-keys-0"}
    assert set(page.figures()) == {*one_run, "staleness", *loads}
    links = [value.removeprefix("#") for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert links == list(SECTIONS)
    assert "Remarks on this folder" not in page.text


def test_the_head_and_the_tiles_say_what_the_files_say(drawn: Any) -> None:
    words = drawn().text
    for told in ("deepfm done", "async · 2 servers × 3 workers · 60 steps", "AUC 0.7200", "6.40 K samples/s"):
        assert told in words
    for told in ("Rows in tables 4.01 K", "Memory of tables 518.6 KiB", "Staleness, largest 7 units; bound 14"):
        assert told in words
    for told in ("Staleness, mean 1.33", "Time 1.2s of training; 3.5s in all", "Restarts 1", "Linux-6.1", "3.12.9"):
        assert told in words
    assert 'mode = "async"' in words


def test_the_curves_are_those_of_metrics_and_of_evaluations_that_only_server_json_has(drawn: Any) -> None:
    figures = drawn().figures()
    assert figures["loss"]["data"][0]["y"] == [step["loss"] for step in make_steps()]
    assert figures["loss"]["data"][-1]["x"] == [20, 30, 40, 60]
    assert figures["auc"]["data"][0]["y"] == pytest.approx([0.64, 0.66, 0.68, 0.72])


def test_the_histogram_holds_the_pushes_and_marks_the_bound(drawn: Any) -> None:
    figure = drawn().figures()["staleness"]
    (bars,) = figure["data"]
    assert (bars["x"], bars["y"]) == ([0, 1, 7], [120, 200, 40])
    assert figure["layout"]["shapes"][0]["x0"] == 14  # (2 * 2 + 1) * 3 - 1


@pytest.mark.parametrize(("mode", "staleness", "bound"), [("sync", 4, 0), ("async", 0, 0), ("async", "free", None)])
def test_the_bound_is_that_of_the_mode(drawn: Any, mode: str, staleness: int | str, bound: int | None) -> None:
    page = drawn(run=run_text(mode, staleness=staleness))
    shapes = page.figures()["staleness"]["layout"].get("shapes", [])
    assert [shape["x0"] for shape in shapes] == ([] if bound is None else [bound])
    assert ("There is no bound." in page.text) == (bound is None)


def test_a_wide_histogram_is_put_into_bins_that_lose_no_push(drawn: Any) -> None:
    counts = {str(tau): 1 for tau in range(1_000)}
    (bars,) = drawn(server={**make_figures(), "staleness": counts}).figures()["staleness"]["data"]
    assert len(bars["x"]) <= 120
    assert sum(bars["y"]) == 1_000


def test_the_load_of_servers_has_its_imbalance(drawn: Any) -> None:
    page = drawn()
    pulled, pushed = page.figures()["servers-moved"]["data"]
    assert (pulled["x"], pushed["x"]) == ([10_000, 30_000], [8_000, 24_000])
    assert pulled["y"] == ["server 0", "server 1"]
    assert "Imbalance (max / mean) 1.50: most on server 1, 54.00 K/s at most." in page.text
    assert page.figures()["servers-busy"]["data"][0]["x"] == pytest.approx([25, 35])


def test_many_servers_are_cut_to_the_largest(drawn: Any) -> None:
    servers = [make_server(index, rows=100 + index) for index in range(100)]
    page = drawn(server={**make_figures(), "servers": servers})
    names = page.figures()["servers-rows"]["data"][0]["x"]
    assert names == [f"server {index}" for index in range(36, 100)]
    assert "The 64 largest of 100 are drawn." in page.text


def test_the_slowest_worker_is_marked_and_the_waiting_summed(drawn: Any) -> None:
    page = drawn()
    compute, waiting = page.figures()["workers"]["data"]
    assert compute["y"] == ["worker 0", "worker 1 (slowest)", "worker 2"]
    assert (compute["x"], waiting["x"]) == ([1.2, 2.4, 1.2], [1.0, 0.2, 1.0])
    assert "is 31% of the workers' time. worker 1 is the slowest: 40ms of compute per unit, × 2.00" in page.text


@pytest.mark.parametrize(("mode", "shares"), [("async", "180 100.0% 42 90 50.0%"), ("geo", "180 99.4% 42 90 49.7%")])
def test_hot_keys_have_their_share_of_what_can_change_a_row(drawn: Any, mode: str, shares: str) -> None:
    page = drawn(run=run_text(mode))
    assert f"-6893182575793277493 {shares}" in page.text
    assert page.figures()["hot-keys-0"]["data"][0]["y"] == ["-6893182575793277493", "42"]


def test_in_sync_a_row_changes_once_a_step(drawn: Any) -> None:
    keys = {"embedding": [[7, 60], [8, 15]]}
    assert "7 60 100.0% 8 15 25.0%" in drawn(run=run_text("sync"), server={**make_figures(), "hot_keys": keys}).text


def test_a_share_above_one_is_not_known(drawn: Any) -> None:
    """A server that came back counts anew, its rows do not."""
    keys = {"embedding": [[7, 500]]}
    assert "7 500 not known" in drawn(server={**make_figures(), "hot_keys": keys}).text


def test_events_are_the_losses_and_how_long_they_lasted(drawn: Any) -> None:
    words = drawn().text
    assert "server lost: 1, silent: 1." in words
    assert "+3.0s 2027-01-15 08:00:03 server lost server 1 1.5s" in words
    assert "+5.0s 2027-01-15 08:00:05 silent worker 2 –" in words
    quiet = drawn(server={**make_figures(), "events": make_figures()["events"][:2]}).text
    assert "No server and no worker was lost." in quiet


def test_geo_has_no_staleness_and_says_why(drawn: Any) -> None:
    page = drawn(run=run_text("geo"), server={**make_figures(), "staleness": {}})
    assert "staleness" not in page.figures()
    assert "they have no staleness" in page.text


def test_a_folder_without_server_json_still_draws(drawn: Any) -> None:
    page = drawn(server=None)
    assert ids(page) == set(SECTIONS)
    assert set(page.figures()) == {"loss", "auc", "throughput", "staleness-steps", "waiting"}
    for told in ("server.json is missing.", "No figures of servers", "No times of workers", "No hot keys", "No events"):
        assert told in page.text


@pytest.mark.parametrize(("part", "name"), [("steps", "metrics.jsonl"), ("ledger", "ledger.json"), ("run", "run.toml")])
def test_any_other_file_may_be_missing(drawn: Any, part: str, name: str) -> None:
    page = drawn(**{part: None})
    assert f"{name} is missing." in page.text
    assert ids(page) == set(SECTIONS)
    if part == "ledger":
        assert "no record of the end" in page.text
        assert "6.40 K samples/s" in page.text


BROKEN: list[Any] = [
    {"servers": [1, {}, {"tables": 3, "load": "x"}], "workers": {}, "staleness": [], "hot_keys": [], "events": 7},
    {"servers": {}, "workers": [{}], "staleness": {"x": 1, "-1": 2, "1": "y"}, "hot_keys": {"t": [[1], [2, 3, 4], 5]}},
    {"events": [{"event": "server lost", "time": 1e300}, {"event": ["x"], "who": {}}, {"event": "silent"}]},
    {"evaluations": [{"step": 10**400, "loss": 10**400}, {"step": "x"}], "staleness": {"3": 10**400}},
    {"servers": [{"pulled_rows_per_s": 1e308, "pushed_rows_per_s": 1e308}], "staleness": {"1": 1e308, "2": 1e308}},
    [],
]


@pytest.mark.parametrize("broken", BROKEN)
def test_figures_with_holes_are_no_error(drawn: Any, broken: Any) -> None:
    assert ids(drawn(server=broken, ledger=[])) == set(SECTIONS)


def test_files_cut_short_are_remarks(tmp_path: Path, page_of: Any) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "server.json", "ledger.json"):
        path = folder / name
        path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    words = page_of(write_report(folder)).text
    for told in ("1 of the lines of metrics.jsonl", "server.json is not JSON", "ledger.json is not JSON", "59 of 60"):
        assert told in words


def poisoned(value: Any) -> Any:
    """An attack in every string and every name."""
    if isinstance(value, dict):
        named = {**value, EVIL: value["embedding"]} if "embedding" in value else value
        return {key: poisoned(item) for key, item in named.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    keep = ("server lost", "silent", "server up")
    return value + EVIL if isinstance(value, str) and value not in keep else value


def test_strings_from_files_stay_text(tmp_path: Path, drawn: Any, page_of: Any) -> None:
    clean = drawn()
    files = {"server": poisoned(make_figures()), "ledger": poisoned(make_ledger())}
    bad = run_text().replace('kind = "deepfm"', f"factory = {json.dumps(EVIL)}")
    page = drawn(**files, run=bad)
    other = write_run(tmp_path / "<img src=y onerror=alert(2)>", run=bad.replace('"async"', json.dumps(EVIL)))
    together = page_of(write_report(tmp_path / "run", beside=[other]))
    for found in (page, together):
        assert found.tags["img"] == 0
        assert len(found.code()) == 2
        assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert page.tags["script"] == clean.tags["script"] + 1  # one more table has hot keys
    assert page.text.count("alert('weft')") >= 10
    assert page.figures()["workers"]["data"][0]["y"][0].startswith("worker 0&lt;/script&gt;")
    assert "&lt;img" in together.figures()["beside-auc-steps"]["data"][1]["name"]


def test_runs_beside_each_other_are_drawn_over_steps_and_seconds(tmp_path: Path, page_of: Any) -> None:
    first = write_run(tmp_path / "a" / "run")
    second = write_run(tmp_path / "b" / "run", run=run_text("sync"), steps=make_steps(step_s=0.05))
    third = write_run(tmp_path / "c" / "run", run=run_text("geo"), steps=make_steps(step_s=0.01)[:40], server=None)
    page = page_of(write_report(first, beside=[second, third, first, second]))
    figures = page.figures()
    beside = {key for key in figures if key.startswith("beside-")}
    assert beside == {f"beside-{what}-{over}" for what in ("loss", "held-out", "auc") for over in ("steps", "seconds")}
    names = ["async · a/run", "sync · b/run", "geo · c/run"]
    assert all([line["name"] for line in figures[key]["data"]] == names for key in beside)
    assert figures["beside-auc-steps"]["data"][1]["x"] == [20, 30, 40, 60]
    assert figures["beside-auc-seconds"]["data"][1]["x"] == pytest.approx([1.0, 1.5, 2.0, 3.0])
    assert "3 runs beside each other" in page.text
    assert "sync · b/run sync 60 0.5800 0.6000 0.7200" in page.text
    soonest = "0.6800 was reached by geo · c/run after 400ms, async · a/run after 800ms, sync · b/run after 2.0s."
    assert soonest in page.text
    assert "run: server.json is missing." in page.text
    assert not (second / "report.html").exists()


def test_a_noisy_last_step_does_not_decide_a_comparison(tmp_path: Path, page_of: Any) -> None:
    steps = make_steps()
    steps[-1]["loss"] = 99.0
    page = page_of(write_report(write_run(tmp_path / "a", steps=steps), beside=[write_run(tmp_path / "b")]))
    assert max(page.figures()["beside-loss-steps"]["data"][0]["y"]) < 99 / 3


def test_a_run_whose_steps_have_no_time_is_left_out_of_seconds(tmp_path: Path, page_of: Any) -> None:
    untimed = [{key: value for key, value in step.items() if key != "step_s"} for step in make_steps()]
    page = page_of(write_report(write_run(tmp_path / "a"), beside=[write_run(tmp_path / "b", steps=untimed)]))
    assert len(page.figures()["beside-auc-steps"]["data"]) == 2
    assert [line["name"] for line in page.figures()["beside-auc-seconds"]["data"]] == ["async · a"]
    assert "not drawn: async · b." in page.text


def test_only_runs_on_servers_stand_beside_each_other(tmp_path: Path) -> None:
    ours, other = write_run(tmp_path / "a"), tmp_path / "b"
    other.mkdir()
    (other / "run.toml").write_text("[train]\nsteps = 3\n", encoding="utf-8")
    for pair in ((ours, other), (other, ours), (ours, tmp_path / "nowhere")):
        with pytest.raises(RunFolderError) as caught:
            write_report(pair[0], beside=[pair[1]])
        assert caught.value.hint


def test_a_folder_is_known_by_what_it_holds(tmp_path: Path) -> None:
    assert is_server_run(write_run(tmp_path / "a"))
    assert is_server_run(write_run(tmp_path / "b", run=None))
    assert is_server_run(write_run(tmp_path / "c", run="broken [", server=None))
    assert not is_server_run(write_run(tmp_path / "d", run="[train]\nsteps = 3\n"))
    assert not is_server_run(tmp_path / "nowhere")


def test_time_runs_on_over_steps(tmp_path: Path) -> None:
    folder = read_server_folder(write_run(tmp_path / "a"))
    clock = train_seconds(folder.metrics.steps)
    assert clock is not None
    assert len(clock) == 60
    assert clock[-1] == pytest.approx(1.2)


def test_the_same_folders_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", run=run_text("sync"))
    assert write_report(first, beside=[second]).read_bytes() == write_report(first, beside=[second]).read_bytes()


def test_the_page_asks_the_network_for_nothing(tmp_path: Path, page_of: Any) -> None:
    page = page_of(write_report(write_run(tmp_path / "a"), beside=[write_run(tmp_path / "b")]))
    links = [value for _, name, value in page.attributes if name in {"src", "href", "action", "data", "srcset"}]
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value)
    assert "default-src 'none'" in policy
    assert not re.search(r"https?:", policy)


def test_the_command_takes_further_runs(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", run=run_text("sync"))
    result = CliRunner().invoke(app, ["report", str(first), "--beside", str(second), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"report": str(first / "report.html")}
    assert "sync · b" in (first / "report.html").read_text(encoding="utf-8")


def test_the_page_needs_neither_torch_nor_the_servers() -> None:
    code = (
        "import sys, weft.report.server.page; "
        "assert 'torch' not in sys.modules; assert 'weft.server' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
