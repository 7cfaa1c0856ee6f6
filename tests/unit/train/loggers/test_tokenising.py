"""Lines while a corpus is tokenised: none for a moment's work, then now and then, and one at the end."""

from __future__ import annotations

import pytest

from weft.train.loggers import tokenising
from weft.train.loggers.tokenising import TokenisingDisplay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [0.0]
    monkeypatch.setattr(tokenising.time, "monotonic", lambda: now_s[0])
    return now_s


def test_short_work_is_silent(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    display = TokenisingDisplay(is_speaking=True, is_main=True)
    display.start(100)
    display.advance(100)
    display.stop()
    assert capsys.readouterr().err == ""


def test_long_work_is_a_line_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    display = TokenisingDisplay(is_speaking=True, is_main=False)
    display.start(6 << 20)
    for _ in range(6):
        clock[0] += 12.0
        display.advance(1 << 20)
    display.stop()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines[:2]] == [
        "tokenising: 1.0 MiB of 6.0 MiB",
        "tokenising: 4.0 MiB of 6.0 MiB",
    ]
    assert lines[-1].startswith("tokenised 6.0 MiB in ")
    assert len(lines) == 3


def test_of_those_that_wait_rank_0_says_so_once(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    for is_main in (True, False):
        display = TokenisingDisplay(is_speaking=True, is_main=is_main)
        for _ in range(3):
            clock[0] += 10
            display.wait_for("process 7 on host")
    assert capsys.readouterr().err == "waiting for process 7 on host, which tokenises the data\n"
