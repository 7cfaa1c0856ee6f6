"""Records of four equal hosts have no difference; each planted one is named with the host that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doctor_hosts import make_host, read_faults

from weft.doctor.check import OK, WARNING, WRONG
from weft.doctor.compare import compare
from weft.doctor.examine import checks_of, record_of
from weft.doctor.situation import Situation


def make_record(name: str, folder: Path, overlay: dict[str, Any] | None = None) -> dict[str, Any]:
    machine = make_host("h100", folder, overlay)
    (folder / "proc/sys/kernel/hostname").write_text(name)
    record = json.loads(json.dumps(record_of(machine)))  # as it arrives from another host
    return {**record, "host": name}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hosts")
    return [make_record(f"node-{index}", folder / str(index)) for index in (0, 1, 3)]


def test_equal_hosts_do_not_differ(three: list[dict[str, Any]]) -> None:
    checks = compare(three)
    assert {check.state for check in checks} == {OK}
    assert len({check.name for check in checks}) >= 15


@pytest.mark.parametrize("fault", read_faults("differences"), ids=lambda fault: fault["name"])
def test_a_difference_is_named(fault: dict[str, Any], three: list[dict[str, Any]], tmp_path: Path) -> None:
    odd = make_record("node-2", tmp_path / "host", fault)
    checks = compare([*three[:2], odd, three[2]])
    name, state, words = fault["expect"]
    found = [check for check in checks if check.name == name and check.state == state and words in check.detail]
    assert found, checks
    assert found[0].fix
    others = {check.name for check in checks if check.state != OK} - {name}
    assert others <= set(fault.get("also", []))


def test_weft_of_another_code_is_wrong(three: list[dict[str, Any]]) -> None:
    other = {**three[1], "software": {**three[1]["software"], "weft_code": "0123456789ab"}}
    (found,) = [check for check in compare([three[0], other, three[2]]) if check.state == WRONG]
    assert (found.name, "code 0123456789ab on node-1" in found.detail) == ("hosts.weft", True)


def test_a_machine_that_is_listed_twice_is_named(three: list[dict[str, Any]]) -> None:
    twin = {**three[0], "host": "alias"}
    (found,) = [check for check in compare([*three, twin]) if check.state == WRONG]
    assert (found.name, found.detail) == ("hosts.names", "hosts with the same name: node-0")


def test_a_probe_that_failed_on_one_host_leaves_the_comparison_of_the_others(three: list[dict[str, Any]]) -> None:
    broken = {key: value for key, value in three[0].items() if key != "gpu"} | {"failed": {"gpu": "ValueError: x"}}
    assert {check.state for check in compare([broken, *three[1:]])} == {OK}
    checks = checks_of(broken, Situation(is_cluster=True))
    assert [check.name for check in checks if check.state != OK] == ["probe.gpu"]
    assert not [check for check in checks if check.state in (WARNING, WRONG)]
