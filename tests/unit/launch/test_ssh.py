"""The words of ssh: keys are checked whatever the user's options, and no word holds a variable of the job."""

import pytest

from weft.launch.host_pool import kept_environment
from weft.launch.ssh import ssh_command


def words(*options: str) -> list[str]:
    return ssh_command(
        "me@gpu1",
        ssh=("ssh",),
        options=options,
        python="/opt/it's/python",
        directory="/my runs",
        connect_timeout_s=7.4,
    )


def test_host_keys_are_checked_whatever_the_options() -> None:
    found = words("-F", "config", "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=99")
    settings = [found[place + 1] for place, word in enumerate(found) if word == "-o"]
    firsts = {setting.partition("=")[0]: setting for setting in reversed(settings)}  # ssh takes the first
    assert firsts["StrictHostKeyChecking"] == "StrictHostKeyChecking=yes"
    assert firsts["BatchMode"] == "BatchMode=yes"
    assert firsts["ConnectTimeout"] == "ConnectTimeout=99"


def test_the_remote_command_is_quoted_and_names_folder_and_program_only() -> None:
    *_, host, remote = words()
    assert host == "me@gpu1"
    assert remote == "cd '/my runs' && exec '/opt/it'\"'\"'s/python' -m weft.launch.host_agent"


def test_settings_of_libraries_are_kept_and_those_of_a_rank_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "secret")
    for name in ("WEFT_SCRATCH", "TORCHELASTIC_RUN_ID", "RANK", "SSH_AUTH_SOCK", "HOME"):
        monkeypatch.setenv(name, "mine")
    kept = kept_environment()
    assert (kept["NCCL_DEBUG"], kept["HF_TOKEN"]) == ("INFO", "secret")
    assert not {"WEFT_SCRATCH", "TORCHELASTIC_RUN_ID", "RANK", "SSH_AUTH_SOCK", "HOME"} & kept.keys()
