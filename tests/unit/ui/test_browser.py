"""The page of `weft ui` in a real browser: tables, curves, live growth, reports and the plan explorer.

WEFT_PICTURES=1 keeps its screenshots as docs/pictures/ui-*.png.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PROGRAM, Chromium

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.report import write_report
from weft.ui.page_data import PageData
from weft.ui.server import PageServer

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not PROGRAM, reason="the pages were not drawn: Chromium is not installed (apt install chromium)"
    ),
]
PLANS = {"ddp": {"mesh": {"dp_replicate": 2}}, "zero-3": {"data_parallel": {"zero": 3}, "mesh": {"dp_shard": 2}}}


SPIKE = """(() => {
    const box = document.body.appendChild(document.createElement("div"));
    Object.assign(box.style, { width: "600px", height: "300px" });
    const x = Array.from({ length: 500 }, (_, place) => place), y = x.map((place) => (place === 250 ? 10 : 0));
    const trace = { mode: "lines", x, y, line: { color: "rgb(255, 0, 0)", width: 2 } }, black = "rgb(0, 0, 0)";
    quick.draw(box, [trace], ["step", "loss"], { text: black, grid: black });
    const canvas = box.firstChild, columns = [], rows = [];
    let spike = null;
    const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let at = 0; at < data.length; at += 4) {
        if (data[at] < 200 || data[at + 1] > 50) continue;
        columns.push(at / 4 % width);
        rows.push(Math.floor(at / 4 / width));
        if (spike === null) spike = columns.at(-1);
    }
    const ends = (values) => [Math.min(...values), Math.max(...values)];
    window.red = { columns: ends(columns), rows: ends(rows), spike };
})()"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (name, rate) in enumerate([("ddp", 3e-4), ("zero-3", 3e-4), ("zero-3-warm", 1e-3)]):
        write_run(tmp_path / "runs" / name, name, rate=rate, seed=number)
    return tmp_path / "runs"


def write_run(path: Path, name: str, *, rate: float, seed: int) -> None:
    path.mkdir(parents=True)
    noise = random.Random(seed)
    (path / "metrics.jsonl").write_text("".join(line(step, noise, rate) for step in range(1, 2001)))
    (path / "run.toml").write_text(RunSpec.default().to_toml().replace("steps = 200", "steps = 2000"))
    (path / "plan.toml").write_text(Plan.from_tables(PLANS.get(name, PLANS["zero-3"])).to_toml())
    terms = {"weights": 21_200_000, "gradients": 21_200_000, "optimizer_state": 42_400_000, "activations": 188_000_000}
    ranks = [{"rank": rank, "peak_bytes": sum(terms.values()), "terms": terms} for rank in range(2)]
    facts = {"status": "finished", "steps": 2000, "num_ranks": 2, "device": "cpu", "elapsed_s": 720.0}
    (path / "ledger.json").write_text(json.dumps({"run": facts, "memory": {"ranks": ranks}}))


def line(step: int, noise: random.Random, rate: float) -> str:
    loss = 1.6 + 3.9 * math.exp(-step * rate / 0.12) + noise.gauss(0, 0.05)
    step_s = 0.36 + abs(noise.gauss(0, 0.02))
    record = {
        **{"step": step, "loss": loss, "grad_norm": 0.4 + abs(noise.gauss(0, 0.2)), "tokens": 8192, "step_s": step_s},
        **{"tokens_per_s": 8192 / step_s, "learning_rate": rate * min(1, step / 100) * (1 - step / 2500)},
        **{"peak_memory_bytes": 318_000_000, **({"eval_loss": loss + 0.08} if step % 200 == 0 else {})},
    }
    return json.dumps(record) + "\n"


@pytest.fixture
def url(folder: Path, tmp_path: Path) -> Iterator[str]:
    answers = PageData(folder, tmp_path / "cache")
    server = PageServer(answers)
    answers.indexer.start()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server.url
    server.shutdown()
    server.server_close()
    answers.indexer.close()


@pytest.fixture
def browser() -> Iterator[Chromium]:
    with Chromium(width=1280, height=1000) as opened:
        yield opened
        assert not opened.errors


def test_runs_are_listed_drawn_compared_and_followed(browser: Chromium, url: str, folder: Path) -> None:
    browser.open(url)
    browser.wait_for("document.body && document.body.dataset.drawn === '1'")
    assert browser.run("location.href").endswith("/")  # the token is not in the history
    names = browser.run("[...document.querySelectorAll('#runs tbody th')].map(cell => cell.textContent)")
    assert sorted(names) == ["ddp", "zero-3", "zero-3-warm"]
    browser.wait_for("document.getElementById('chart-loss').data.length === 6")  # each with its smoothed curve
    browser.wait_for("document.getElementById('chart-grad_norm') && document.getElementById('chart-grad_norm').data")
    picture(browser, "ui-runs.png")

    with (folder / "ddp" / "metrics.jsonl").open("a") as file:
        file.write(line(2001, random.Random(0), 3e-4))
    browser.wait_for("Math.max(...document.getElementById('chart-loss').data.map(t => Math.max(...t.x))) === 2001")

    change(browser, "over", "value", "tokens")
    browser.wait_for("Math.max(...document.getElementById('chart-loss').data[0].x) === 2001 * 8192")
    change(browser, "log-y", "checked", True)
    browser.wait_for("document.getElementById('chart-loss').layout.yaxis.type === 'log'")
    change(browser, "perplexity", "checked", True)
    browser.wait_for("Math.max(...document.getElementById('chart-loss').data[0].y) > 100")
    browser.run("document.querySelector('#runs tbody input').click()")
    browser.wait_for("document.getElementById('chart-loss').data.length === 4")
    browser.run("Object.assign(document.getElementById('filter'), {value: 'warm'}).dispatchEvent(new Event('input'))")
    assert browser.run("document.querySelectorAll('#runs tbody tr').length") == 1

    browser.run("document.querySelector('#runs tbody button').click()")
    frame = "document.getElementById('report').contentDocument"
    browser.wait_for(f"{frame}.querySelector('#figure-memory') && {frame}.querySelectorAll('.plot svg').length > 3")
    assert "2,000 steps" in browser.run(f"{frame}.body.textContent")
    origins = browser.run("performance.getEntriesByType('resource').map(e => new URL(e.name).origin)")
    assert set(origins) == {browser.run("location.origin")}


def test_the_first_drawing_waits_for_no_library(browser: Chromium, url: str) -> None:
    browser.open(url)
    browser.wait_for("document.body && document.body.dataset.ready === '1'")
    drawn, asked = (
        browser.run(f"performance.{found}[0].startTime")
        for found in (
            "getEntriesByName('drawn')",
            "getEntriesByType('resource').filter(e => e.name.endsWith('plotly.js'))",
        )
    )
    assert drawn < asked
    assert browser.run("document.querySelectorAll('canvas.quick').length") == 0  # plotly's chart is in its place


def test_the_first_drawing_has_every_spike(browser: Chromium, url: str) -> None:
    browser.open(url)
    browser.wait_for("document.body && document.body.dataset.drawn === '1'")
    browser.run(SPIKE)
    found = browser.run("window.red")
    assert found["columns"] == pytest.approx([62, 600 - 14], abs=3)
    assert found["rows"] == pytest.approx([10 + 248 * 0.5 / 11, 258 - 248 * 0.5 / 11], abs=4)
    assert found["spike"] == pytest.approx(62 + 524 * 250 / 499, abs=3)


def test_the_plan_explorer_answers_while_sliders_move(browser: Chromium, url: str) -> None:
    browser.open(url)
    browser.wait_for("document.body && document.body.dataset.drawn === '1'")
    browser.run("document.querySelector('[data-view=plans]').click()")
    browser.wait_for("document.getElementById('words').textContent.includes('does not fit')")
    browser.run("document.getElementById('plan-best').click()")
    browser.wait_for("document.getElementById('words').textContent.includes(': fits')")
    browser.wait_for("document.getElementById('plan-memory').data.length > 3")
    picture(browser, "ui-plans.png")
    slider = "Object.assign(document.getElementById('plan-tp'), {value: '4'})"
    browser.run(f"{slider}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    browser.wait_for("document.getElementById('words').textContent.includes('does not divide 8 devices')")
    assert browser.run("document.getElementById('words').classList.contains('refused')")


def test_a_report_is_drawn_from_its_file_alone(browser: Chromium, folder: Path) -> None:
    browser.open(write_report(folder / "ddp").as_uri())
    drawn = "[...document.querySelectorAll('.plot')].every(box => box.querySelector('svg'))"
    browser.wait_for(f"document.readyState === 'complete' && {drawn}")
    assert browser.run("document.querySelectorAll('.plot').length") == 5
    assert browser.run("performance.getEntriesByType('resource').length") == 0


def change(browser: Chromium, name: str, key: str, value: object) -> None:
    event = "dispatchEvent(new Event('change'))"
    browser.run(f"Object.assign(document.getElementById('{name}'), {{{key}: {json.dumps(value)}}}).{event}")


def picture(browser: Chromium, name: str) -> None:
    if os.environ.get("WEFT_PICTURES"):
        browser.run("new Promise(done => setTimeout(done, 1500))")
        browser.photograph(PICTURES / name)
