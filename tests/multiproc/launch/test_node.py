"""The agent of a node: the exit codes that clusters act on, and a save before a stop, on two nodes of one machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import checkpoint_steps, environment, last_step, write_corpus, write_run

PATIENCE_S = 240


def node(rank: int, port: int, *words: str | Path, folder: Path, nodes: int = 2) -> subprocess.Popen[str]:
    sizes = ["--nodes", str(nodes), "--node-rank", str(rank), "--address", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "weft.launch.node", *sizes, "--stopped-code", "143", "--", *map(str, words)]
    own = environment(folder / "cache", GLOO_SOCKET_IFNAME="lo")
    return subprocess.Popen(command, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_bad_input_is_exit_code_2_and_one_message(tmp_path: Path) -> None:
    with node(0, free_port(), "train", "none.toml", folder=tmp_path, nodes=1) as agent:
        _, err = agent.communicate(timeout=PATIENCE_S)
    assert agent.returncode == 2, err
    assert "error [W101]: there is no file none.toml" in err
    assert "Traceback" not in err


@pytest.mark.extended
def test_asked_to_end_the_ranks_of_both_nodes_save_and_the_same_command_continues(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "texts")
    run = write_run(tmp_path / "run.toml", corpus, {"train.steps": 3000, "checkpoint.asynchronous": False})
    out = tmp_path / "out"
    words = ("train", run, "--device", "cpu", "--out", out, "--continue")
    stopped_at = 0
    for attempt in (1, 2):
        port = free_port()
        agents = [node(rank, port, *words, folder=tmp_path) for rank in (0, 1)]
        try:
            deadline = time.monotonic() + PATIENCE_S
            while last_step(out) < stopped_at + 3:
                assert time.monotonic() < deadline
                assert all(agent.poll() is None for agent in agents), agents[0].communicate()[1]
                time.sleep(0.1)
            os.kill(agents[1].pid, signal.SIGTERM)  # one node is asked; the ranks agree
            ends = [agent.communicate(timeout=PATIENCE_S) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        assert [agent.returncode for agent in agents] == [0, 143], ends
        assert checkpoint_steps(out)[-1] > stopped_at
        assert ("resuming from step" in ends[0][0] + ends[0][1]) is (attempt == 2)
        stopped_at = checkpoint_steps(out)[-1]
