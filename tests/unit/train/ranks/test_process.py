"""One rank alone: joining, leaving, stopping, and the way out after an error."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft.core.errors import DataError, DeviceError, InputError
from weft.train.ranks import process as process_module
from weft.train.ranks.environment import Rendezvous
from weft.train.ranks.process import Process, StopFlag, join, leave, phase, report_failures
from weft.train.ranks.store import open_store

ALONE = Process(rank=0, local_rank=0, world_size=1, restart_count=0)


@pytest.fixture(autouse=True)
def an_exit_that_can_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed rank ends without the interpreter's end: here that rank is the test run itself."""
    monkeypatch.setattr(process_module, "_end_at_once", sys.exit)


@pytest.fixture(autouse=True)
def started_by_nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "WEFT_", "GLOO_", "NCCL_"))] + ["RANK"]:
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_rank_alone_has_a_group_and_leaves_nothing_behind() -> None:
    before = dict(os.environ)
    assert join(device_type="cpu", timeout_s=60) == ALONE
    assert join(device_type="cpu", timeout_s=60) == ALONE
    if sys.platform == "linux":
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 1
    leave()
    leave()
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_a_group_that_exists_is_taken_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert join(device_type="cpu", timeout_s=60) == ALONE
    leave()
    assert dist.is_initialized()


def test_leaving_while_an_error_is_under_way_keeps_the_group() -> None:
    def work() -> None:
        try:
            raise ValueError("x")
        finally:
            leave()

    join(device_type="cpu", timeout_s=60)
    with pytest.raises(ValueError, match="x"):
        work()
    assert dist.is_initialized()
    leave()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_gpu_that_is_not_there_is_bad_input() -> None:
    with pytest.raises(DeviceError, match="GPU 0"):
        join(device_type="cuda", timeout_s=60)
    assert not dist.is_initialized()


def test_an_error_is_told_with_its_hint_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, report_failures(), phase("build"):
        raise DataError("no text", hint="give some")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error [W401]: no text\nhint: give some\n"


def test_the_stack_trace_is_shown_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_DEBUG", "1")
    with pytest.raises(SystemExit) as caught, report_failures():
        raise ValueError("boom")
    assert caught.value.code == 3
    assert "Traceback" in capsys.readouterr().err


def test_under_the_launcher_the_error_is_written_and_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_SCRATCH", str(tmp_path))
    join(device_type="cpu", timeout_s=60)
    with pytest.raises(SystemExit), report_failures(), phase("step 2"):
        raise ValueError("boom")
    leave()
    written = json.loads((tmp_path / "error-0.json").read_text())
    assert (written["message"], written["phase"]) == ("ValueError: boom", "step 2")
    assert (tmp_path / "pid-0").read_text() == f"{os.getpid()}\n"
    assert capsys.readouterr().err == ""


def test_a_broken_environment_is_reported_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(SystemExit) as caught, report_failures():
        join(device_type="cpu", timeout_s=60)
    assert caught.value.code == 2
    assert "RANK is 'one'" in capsys.readouterr().err


def test_a_clean_exit_passes() -> None:
    with pytest.raises(SystemExit) as caught, report_failures():
        raise SystemExit(0)
    assert caught.value.code == 0


def test_signals_only_set_the_flag() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_has_ended_outlives_a_late_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several hosts are told one after the other, and ranks agree on a stop before the last one is."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "weft")
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with StopFlag():
            pass
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_flag_outside_the_main_thread_is_harmless() -> None:
    seen: list[bool] = []

    def work() -> None:
        with StopFlag() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_rank_zero_cannot_listen_where_it_is_not() -> None:
    with pytest.raises(InputError, match=r"192\.0\.2\.1"):
        open_store(Rendezvous(address="192.0.2.1", port=0, served_by_agent=False), process=ALONE, timeout_s=5)
