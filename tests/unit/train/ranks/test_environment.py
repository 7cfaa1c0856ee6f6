"""Reading a rank's place from the launcher's, torchrun's or Slurm's variables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.train.ranks.environment import Process, Rendezvous, first_slurm_host, read_process, read_rendezvous

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[03-05]",
}


def test_torchrun() -> None:
    assert read_process(TORCHRUN) == Process(rank=3, local_rank=1, world_size=4, restart_count=2)
    assert read_rendezvous(TORCHRUN, world_size=4) == Rendezvous(address="10.0.0.1", port=29500, served_by_agent=True)


def test_srun_and_the_derived_rendezvous_is_the_same_for_every_task() -> None:
    assert read_process(SRUN) == Process(rank=5, local_rank=1, world_size=8, restart_count=0)
    rendezvous = read_rendezvous(SRUN, world_size=8)
    assert rendezvous is not None
    assert (rendezvous.address, rendezvous.served_by_agent) == ("gpu03", False)
    assert rendezvous == read_rendezvous({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, world_size=8)
    assert rendezvous != read_rendezvous({**SRUN, "SLURM_STEP_ID": "1"}, world_size=8)


def test_torchrun_inside_a_slurm_job_wins() -> None:
    assert read_process({**SRUN, **TORCHRUN}).rank == 3


def test_what_is_given_beats_what_is_derived() -> None:
    rendezvous = read_rendezvous({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "1234"}, world_size=8)
    assert rendezvous == Rendezvous(address="a", port=1234, served_by_agent=False)


def test_a_batch_shell_is_no_task() -> None:
    shell = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert read_process(shell).world_size == 1


def test_nothing_set_is_one_rank_that_meets_nobody() -> None:
    assert read_process({}) == Process(rank=0, local_rank=0, world_size=1, restart_count=0)
    assert read_process({}).is_main
    assert read_rendezvous({"MASTER_ADDR": "left over"}, world_size=1) is None


@pytest.mark.parametrize(
    "broken",
    [{"WORLD_SIZE": "four"}, {"WORLD_SIZE": "-1"}, {"RANK": ""}, {"RANK": "4"}, {"LOCAL_RANK": "x"}],
)
def test_a_broken_variable_is_bad_input(broken: dict[str, str]) -> None:
    with pytest.raises(InputError) as caught:
        read_process({**TORCHRUN, **broken})
    assert caught.value.hint


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_rendezvous_is_bad_input(missing: str) -> None:
    with pytest.raises(InputError, match=missing):
        read_rendezvous({name: value for name, value in TORCHRUN.items() if name != missing}, world_size=4)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("n[07,9]-ib,x", "n07-ib"),
        ("r[1-2]n[1-4]", None),
        ("", None),
        ("n[1-3", None),
    ],
)
def test_the_first_slurm_host(nodelist: str, host: str | None) -> None:
    assert first_slurm_host(nodelist) == host


@settings(max_examples=100)
@given(st.text(alphabet="an0-9[],", max_size=20))
def test_any_nodelist_gives_a_host_without_brackets_or_nothing(nodelist: str) -> None:
    host = first_slurm_host(nodelist)
    assert host is None or (host and not set(host) & set("[],"))
