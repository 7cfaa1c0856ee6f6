"""The record of a failure: phase, class, chain, and the round trip through JSON."""

from pathlib import Path

import pytest
import torch

from weft.core.errors import DataError, MemoryLimitError, RankError, SaveError
from weft.train.ranks.environment import Process
from weft.train.ranks.failures import as_weft_error, is_secondary, phase, read_record, record_failure, write_record

PROCESS = Process(rank=1, local_rank=1, world_size=2, restart_count=0)


def raised(error: Exception, *, cause: Exception | None = None, phases: tuple[str, ...] = ()) -> Exception:
    try:
        if phases:
            with phase(phases[0]):
                raise raised(error, cause=cause, phases=phases[1:])
        raise error from cause
    except Exception as caught:
        return caught


def test_the_innermost_phase_is_named() -> None:
    error = raised(ValueError("x"), phases=("step 12", "save"))
    assert record_failure(error, process=PROCESS).phase == "save"
    assert record_failure(raised(ValueError("x")), process=PROCESS).phase == "start"


def test_a_caught_error_leaves_no_phase_behind() -> None:
    raised(ValueError("caught"), phases=("build",))
    assert record_failure(raised(ValueError("later"), phases=("step 1",)), process=PROCESS).phase == "step 1"


def test_errors_become_errors_of_the_tree() -> None:
    own = DataError("none")
    assert as_weft_error(own) is own
    other = as_weft_error(ValueError("boom\nmore"))
    assert (type(other), other.message) == (RankError, "ValueError: boom")
    assert as_weft_error(KeyError()).message == "KeyError: (no message)"
    elsewhere = [  # the real one below has one of these wordings
        RuntimeError(f"[enforce fail] DefaultCPUAllocator: {words}: you tried to allocate 8 bytes.")
        for words in ("can't allocate memory", "not enough memory")
    ]
    memories = [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), _cpu_allocator_error(), *elsewhere]
    for memory in memories:
        assert type(as_weft_error(memory)) is MemoryLimitError


def _cpu_allocator_error() -> Exception:
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        return error
    raise AssertionError("an exbibyte was allocated")


def test_a_lost_peer_is_seen_through_the_whole_chain() -> None:
    reset = RuntimeError("[../pair.cc:538] Read error [127.0.0.1]:4: Connection reset by peer")
    assert is_secondary(reset)
    assert is_secondary(raised(SaveError("not written"), cause=reset))
    assert not is_secondary(ValueError("bad value"))


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    record = record_failure(raised(DataError("no text", hint="give some"), phases=("build",)), process=PROCESS)
    assert read_record(tmp_path, rank=1) is None
    write_record(record, scratch=tmp_path)
    assert read_record(tmp_path, rank=1) == record
    assert [path.name for path in tmp_path.iterdir()] == ["error-1.json"]


def test_the_error_again_with_rank_and_phase() -> None:
    error = record_failure(raised(DataError("no text"), phases=("build",)), process=PROCESS).to_error()
    assert (type(error), error.message) == (DataError, "rank 1 failed in build: no text")


def test_one_rank_alone_is_not_numbered() -> None:
    alone = Process(rank=0, local_rank=0, world_size=1, restart_count=0)
    assert record_failure(DataError("no text"), process=alone).to_error().message == "no text"


@pytest.mark.parametrize("exit_code", [2, 3])
def test_the_exit_code_is_the_errors(exit_code: int) -> None:
    error = DataError("x") if exit_code == 2 else RankError("x")
    assert record_failure(error, process=PROCESS).exit_code == exit_code
