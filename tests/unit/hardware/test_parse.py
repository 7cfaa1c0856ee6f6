"""How people write clusters: what is understood, what is refused, and what the refusal says."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.cluster import Cluster
from weft.core.errors import BadValueError, DeviceError, WeftError
from weft.hardware import catalogue, cluster, device_names


@pytest.mark.parametrize(
    ("text", "name", "num_nodes", "devices_per_node"),
    [
        ("H200", "H200", 1, 1),
        ("2xRTX4090", "RTX4090", 1, 2),
        ("8xH100-80GB", "H100-80GB", 1, 8),
        ("4x8xH100-80GB", "H100-80GB", 4, 8),
        ("16384xH100-80GB", "H100-80GB", 2048, 8),
        ("2x4xH100", "H100-80GB", 2, 4),
        ("144xGB200", "GB200", 2, 72),
        ("8xh100", "H100-80GB", 1, 8),
        (" 4 X 8 x a100 ", "A100-80GB", 4, 8),
        ("8×V100", "V100-32GB", 1, 8),
        ("8xV100-16GB", "V100-16GB", 1, 8),
        ("4090", "RTX4090", 1, 1),
        ("4x4090", "RTX4090", 1, 4),
        ("2x4x5090", "RTX5090", 2, 4),
        ("4xcpu", "CPU", 1, 4),
    ],
)
def test_what_is_understood(text: str, name: str, num_nodes: int, devices_per_node: int) -> None:
    built = cluster(text)
    assert (built.device.name, built.num_nodes, built.devices_per_node) == (name, num_nodes, devices_per_node)


@given(
    name=st.sampled_from(device_names()),
    num_nodes=st.integers(1, 4096),
    devices_per_node=st.integers(1, 8),
    fabric=st.sampled_from(["", "@ethernet-100", "@infiniband-ndr"]),
)
def test_the_name_of_a_cluster_parses_back_to_it(name: str, num_nodes: int, devices_per_node: int, fabric: str) -> None:
    built = cluster(f"{num_nodes}x{devices_per_node}x{name}{fabric}")
    assert built.num_devices == num_nodes * devices_per_node
    assert cluster(built.name) == built


def _try(text: str) -> Cluster | WeftError:
    try:
        return cluster(text)
    except WeftError as error:
        return error


@given(num_devices=st.integers(1, 20_000))
def test_a_count_is_split_evenly_or_refused_with_counts_that_work(num_devices: int) -> None:
    outcome = _try(f"{num_devices}xH100")
    if isinstance(outcome, Cluster):
        assert outcome.num_devices == num_devices
        return
    assert num_devices % 8
    assert cluster(outcome.hint.rsplit(" ", 1)[-1]).num_devices == num_devices
    below = num_devices // 8 * 8
    assert f"{below} and {below + 8}" in outcome.hint


@given(text=st.text(max_size=20) | st.from_regex(r"\A\d?x?\d?x?.{0,4}(gb|\.toml|@.{0,3})?\Z"))
def test_any_text_gives_a_cluster_or_an_error_a_person_can_act_on(text: str) -> None:
    outcome = _try(text)
    assert isinstance(outcome, Cluster) or outcome.hint


def test_a_fabric_replaces_the_link_between_nodes_alone() -> None:
    plain, slow = cluster("4x8xH100-80GB"), cluster("4x8xH100-80GB@Ethernet-100")
    assert (slow.inside, slow.device) == (plain.inside, plain.device)
    assert slow.between.name == "ethernet-100"


def test_devices_share_the_port_of_their_node() -> None:
    alone, eight = cluster("2x1xH100@ethernet-100"), cluster("2x8xH100@ethernet-100")
    assert alone.between.bytes_per_s == pytest.approx(8 * eight.between.bytes_per_s)
    assert cluster("2x1xH100").between == cluster("2x8xH100").between, "an InfiniBand port a device"


def test_another_memory_size_keeps_the_usable_share() -> None:
    usual, smaller = cluster("H100").device, cluster("8xH100-64GB").device
    assert smaller.name == "H100-64GB"
    assert smaller.memory_bytes == pytest.approx(usual.memory_bytes * 64 / 80)
    assert smaller.peak_flops == usual.peak_flops
    assert any("scaled" in source for source in cluster("H100-64GB").sources)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("8xH1000", DeviceError, "'H100-80GB'"),
        ("8xRTX4900", DeviceError, "'RTX4090'"),
        ("8xnothing", DeviceError, "A100-40GB"),
        ("x8", DeviceError, "known"),
        ("", BadValueError, "8xH100-80GB"),
        ("8xH100@", BadValueError, "8xH100-80GB"),
        ("0xH100", BadValueError, "no devices"),
        ("4x0xH100", BadValueError, "no devices"),
        ("12xH100", BadValueError, "8 and 16"),
        ("256xGB200", BadValueError, "4x64xGB200"),
        ("2x16xH100", BadValueError, "at most 8"),
        ("8xH100@etherent-100", BadValueError, "'ethernet-100'"),
        ("8xH100@nvlink-4", BadValueError, "infiniband-ndr"),
        ("8xH100-0GB", DeviceError, "H100-80GB"),
    ],
)
def test_what_is_refused(text: str, error: type[WeftError], says: str) -> None:
    with pytest.raises(error) as caught:
        cluster(text)
    assert says in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.exit_code == 2


def test_a_cluster_is_quick_and_reads_only_what_it_needs() -> None:
    spent = []
    for _ in range(5):
        catalogue._read.cache_clear()
        catalogue._files.cache_clear()
        started = time.perf_counter()
        cluster("8xH100-80GB")
        spent.append(time.perf_counter() - started)
    assert min(spent) < 0.005
    assert catalogue._read.cache_info().currsize == 5, "device, node, three links"


def test_importing_the_room_reads_no_data_and_wakes_nothing_heavy() -> None:
    code = (
        "import sys, weft.hardware; from weft.hardware import catalogue;"
        "heavy = {'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules);"
        "sys.exit(bool(heavy) or catalogue._read.cache_info().currsize)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
