"""Ranks on two hosts whose links are processes of this machine (tests/support/fake_ssh.py): restarts and failures."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import HostsError, RankError, WeftError
from weft.launch.host_list import read_hosts
from weft.launch.hosts import launch_hosts
from weft.launch.hosts_request import HostsRequest

FAKE_SSH = Path(__file__).parents[2] / "support" / "fake_ssh.py"
RANK_SCRIPT = Path(__file__).with_name("rank_script.py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def request(mode: str, marks: Path, *, hosts: str = "host1:1,host2:1", **fields: Any) -> HostsRequest:
    return HostsRequest(
        hosts=read_hosts(hosts),
        command=(mode, str(marks)),
        program=(str(RANK_SCRIPT),),
        ssh=(sys.executable, str(FAKE_SSH)),
        directory=str(marks),
        **fields,
    )


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_killed_rank_restarts_the_ranks_of_all_hosts(tmp_path: Path) -> None:
    said: list[str] = []
    launch_hosts(request("kill-1", tmp_path, max_restarts=1, folder=tmp_path / "run"), log=said.append)
    assert [(tmp_path / f"done-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert len(said) == 1
    assert said[0].startswith("rank 0 on host1 (pid ")
    assert said[0].endswith("was killed by SIGKILL; restarting on host1, host2 (2 ranks) (1 of 1)")


def test_ranks_of_hosts_are_forked_after_one_import_per_host(tmp_path: Path) -> None:
    asked = replace(
        request("kill", tmp_path, max_restarts=1, folder=tmp_path / "run"),
        program=("-m", "warm_script"),
        imports=("decimal",),
        environment={"PYTHONPATH": str(RANK_SCRIPT.parent)},
    )
    launch_hosts(asked, log=lambda line: None)
    found = {
        (generation, rank): json.loads((tmp_path / f"facts-{generation}-{rank}").read_text())
        for generation in (0, 1)
        for rank in (0, 1)
    }
    assert all(facts["is_warm"] and facts["is_leader"] and facts["world"] == "2" for facts in found.values())
    assert all(found[0, rank]["parent"] == found[1, rank]["parent"] for rank in (0, 1))  # one import, two generations
    assert found[0, 0]["parent"] != found[0, 1]["parent"]
    logs = "".join(path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert logs.count("rank 0 began") == logs.count("rank 1 began") == 2


@pytest.mark.extended
def test_a_failure_names_host_and_rank(tmp_path: Path) -> None:
    with pytest.raises(RankError) as found:
        launch_hosts(request("raise", tmp_path))
    assert found.value.message == "rank 1 on host2 failed in step 3: ValueError: boom"


def test_unreachable_hosts_are_named_and_nothing_starts(tmp_path: Path) -> None:
    with pytest.raises(HostsError, match=r"unknown1 cannot be reached: .*not resolve hostname.*; unknown2 cannot"):
        launch_hosts(request("forever", tmp_path, hosts="host1:1,unknown1:1,unknown2:1"))
    assert os.listdir(tmp_path) == []


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"host1 cannot start the agent: .*/nowhere/python"):
        launch_hosts(request("forever", tmp_path, python="/nowhere/python"))
