"""The rendezvous address and the sockets' interface: names that do not resolve, names of loopback, Slurm's own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weft.core.errors import InputError
from weft.train.ranks import address
from weft.train.ranks.address import socket_interface, with_known_address
from weft.train.ranks.environment import Rendezvous
from weft.train.ranks.failures import as_weft_error


def rendezvous(name: str) -> Rendezvous:
    return Rendezvous(address=name, port=29500, served_by_agent=False)


def test_a_name_that_does_not_resolve_is_one_sentence_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(InputError, match=r"gpu07\.invalid, does not resolve on this host") as found:
        with_known_address(rendezvous("gpu07.invalid"), {"MASTER_ADDR": "gpu07.invalid"})
    assert time.monotonic() - started < 30  # a resolver may wait for its own timeouts; the store waits for minutes
    assert "MASTER_ADDR" in found.value.hint


def test_slurm_names_the_address_of_a_node_with_an_unknown_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "NodeName=$3 Arch=x86_64 NodeAddr=127.0.0.9 NodeHostName=$3"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert with_known_address(rendezvous("n1.invalid"), {}).address == "127.0.0.9"
    with pytest.raises(InputError):  # the user's own choice is not replaced
        with_known_address(rendezvous("n1.invalid"), {"MASTER_ADDR": "n1.invalid"})


@pytest.mark.parametrize(
    ("name", "resolved", "is_one_host", "interface"),
    [
        ("head", "10.0.0.1", False, "route"),
        ("head", "127.0.1.1", False, "outward"),  # Debian's habit
        ("head", "127.0.1.1", True, "route"),
        ("127.0.0.1", "127.0.0.1", False, "route"),
    ],
)
def test_a_name_of_loopback_is_not_what_other_hosts_see(
    name: str, resolved: str, is_one_host: bool, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address.sys, "platform", "linux")
    monkeypatch.setattr(address, "resolve", lambda name, timeout_s: resolved)
    monkeypatch.setattr(address, "interface_to", lambda name: "route")
    monkeypatch.setattr(address, "outward_interface", lambda: "outward")
    assert socket_interface(rendezvous(name), is_one_host=is_one_host) == interface


def test_a_mesh_that_does_not_connect_has_a_hint() -> None:
    error = as_weft_error(RuntimeError("Gloo connectFullMesh failed with [../gloo/transport] no error"))
    assert "GLOO_SOCKET_IFNAME" in error.hint
