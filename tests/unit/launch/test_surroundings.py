"""What the launcher gives its ranks and takes from its own process: variables, signals, folders, stores."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weft.core.errors import BadValueError, InputError
from weft.core.processes import num_cores
from weft.launch.agent import Generations, RankSurroundings
from weft.launch.local import launch
from weft.launch.rank_variables import rank_variables
from weft.launch.stop_signals import StopSignals
from weft.launch.warm_server import why_unfit


def test_launch_is_imported_without_torch() -> None:
    code = "import sys, weft.launch.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_defaults_fill_gaps_and_never_replace(tmp_path: Path) -> None:
    bare = rank_variables(scratch=tmp_path, num_ranks=2, given={}, platform="linux")
    assert bare["OMP_NUM_THREADS"] == str(max(1, num_cores() // 2))
    assert (bare["GLOO_SOCKET_IFNAME"], bare["WEFT_SCRATCH"]) == ("lo", str(tmp_path))
    assert bare["WEFT_LAUNCHER_PID"] == str(os.getpid())
    given = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    assert rank_variables(scratch=tmp_path, num_ranks=2, given=given, platform="linux").keys().isdisjoint(given)
    assert bare["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        found = rank_variables(scratch=tmp_path, num_ranks=2, given={name: "max_split_size_mb:64"}, platform="linux")
        assert not any("ALLOC_CONF" in key for key in found)  # torch reads one of them: none is added to the user's
    assert "GLOO_SOCKET_IFNAME" not in rank_variables(scratch=tmp_path, num_ranks=2, given={}, platform="darwin")


def test_more_ranks_than_cores_still_get_a_thread(tmp_path: Path) -> None:
    assert rank_variables(scratch=tmp_path, num_ranks=10_000, given={}, platform="linux")["OMP_NUM_THREADS"] == "1"


def test_stop_signals_count_and_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as stops:
        assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == ""
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stops.count == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM"


def test_an_ignored_hangup_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stops:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stops.count == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_every_generation_has_a_store_of_its_own() -> None:
    generations = Generations()
    first, second = generations.next_rendezvous(), generations.next_rendezvous()
    first.store.set("address", "dead")
    assert not second.store.check(["address"])
    assert (first.world_size, first.bootstrap_store_info.master_addr) == (1, "127.0.0.1")
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port


def test_a_refused_generation_raises_the_reason() -> None:
    generations = Generations()
    generations.refuse(InputError("bad"))
    with pytest.raises(InputError, match="bad"):
        generations.next_rendezvous()


def test_a_generation_starts_in_an_empty_folder(tmp_path: Path) -> None:
    surroundings = RankSurroundings(scratch=tmp_path, num_ranks=1)
    for _ in range(2):
        variables = {0: {"TORCHELASTIC_RESTART_COUNT": "1"}}
        surroundings.begin(variables)
        assert Path(variables[0]["WEFT_SCRATCH"]) == surroundings.folder == tmp_path / "generation-1"
        assert list(surroundings.folder.iterdir()) == []
        (surroundings.folder / "error-0.json").write_text("{}")


def test_a_process_forks_only_with_one_thread_and_no_open_device(tmp_path: Path) -> None:
    (tmp_path / "task/1").mkdir(parents=True)
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd/0").symlink_to("/dev/null")
    assert why_unfit(tmp_path) == ""
    (tmp_path / "fd/5").symlink_to("/dev/nvidiactl")
    assert why_unfit(tmp_path) == "the imports opened /dev/nvidiactl"
    (tmp_path / "task/2").mkdir()
    assert why_unfit(tmp_path) == "the imports started 1 threads"


def test_no_ranks_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadValueError):
        launch(["true"], num_ranks=0, scratch=tmp_path)
