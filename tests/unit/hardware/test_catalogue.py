"""The data: every figure sourced and dated, every name that is referred to there, figures within reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import BadValueError, ConfigFileError, DeviceError, UnknownKeyError
from weft.hardware import catalogue, cluster, device_names, fabric_names

FILES = sorted(catalogue.DATA.glob("*/*.toml"))
# Names and descriptions; everything else is a figure or a choice that somebody has to answer for.
UNSOURCED = {"name", "title", "aliases", "node", "kind", "per", "sources"}
ASKED_FOR = {
    *("A100-40GB", "A100-80GB", "H100-80GB", "H100-PCIe", "H100-NVL", "H800", "H200", "B200", "GB200", "MI300X"),
    *("L40S", "RTX4090", "RTX5090", "V100-16GB", "V100-32GB", "T4", "A10G", "L4", "CPU"),
}


def _load(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _of(kind: str) -> list[Path]:
    return [path for path in FILES if path.parent.name == kind]


def test_the_devices_that_were_asked_for_are_there() -> None:
    assert set(device_names()) >= ASKED_FOR


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_is_whole_and_every_figure_has_a_source_and_a_date(path: Path) -> None:
    table = _load(path)
    catalogue.check_table(path.parent.name, table, source=path.stem, partial=False)  # type: ignore[arg-type]
    assert table["name"].lower() == path.stem, "a file is found by its name"
    sourced = {key for source in table["sources"] for key in source["of"]}
    assert sourced == set(table) - UNSOURCED
    for source in table["sources"]:
        assert set(source) <= {"of", "document", "date", "note", "estimated"}
        assert source["document"]
        assert re.fullmatch(r"20\d\d(-\d\d){0,2}", source["date"])


@pytest.mark.parametrize("path", _of("devices"), ids=lambda path: path.stem)
def test_device_figures_are_within_reason(path: Path) -> None:
    table = _load(path)
    assert set(table["rates"]) == set(table["peak_flops"]), "a dtype with a peak needs a rate"
    assert "float32" in table["peak_flops"]
    # Between 88% and 101% of the size as sold in GiB: outside, somebody mixed up GB and GiB or two devices.
    assert 0.88 < table["memory_bytes"] / (table["memory_gb"] * 2**30) < 1.01
    assert 0.5 <= table["memory_share"] <= 0.95
    assert table["overhead_bytes"] < 0.05 * table["memory_bytes"]
    for curve in table["rates"].values():
        assert 0.05 < curve["best"] < 1
        assert curve["half_flops"] > 0


@pytest.mark.parametrize("name", device_names())
def test_every_device_makes_a_cluster_of_one_node_and_of_two(name: str) -> None:
    one = cluster(name)
    capacity = catalogue.table("nodes", catalogue.device_table(name)["node"])["devices_per_node"]
    two = cluster(f"{2 * capacity}x{name}")
    assert (one.num_devices, two.num_nodes, two.devices_per_node) == (1, 2, capacity)
    assert two.inside.bytes_per_s > two.between.bytes_per_s, "a node is where the fast links are"
    assert two.inside.latency_s > 0
    assert two.between.latency_s > 0
    assert two.sources


def test_old_devices_have_no_bfloat16() -> None:
    for name in ("V100-16GB", "V100-32GB", "T4"):
        assert "bfloat16" not in cluster(name).device.peak_flops
    assert "float8" not in cluster("A100").device.peak_flops


def test_peaks_are_dense() -> None:
    # Datasheets print the sparse figure, twice the dense one, in the larger type.
    assert cluster("H100").device.peak_flops["bfloat16"] == pytest.approx(989.4e12)
    assert cluster("A100").device.peak_flops["bfloat16"] == pytest.approx(312e12)


def test_aliases_are_unique_and_shadow_no_name() -> None:
    aliases = [alias.lower() for path in _of("devices") for alias in _load(path)["aliases"]]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & {name.lower() for name in device_names()}


def test_fabrics_join_nodes() -> None:
    assert {"infiniband-ndr", "ethernet-100", "efa-400"} <= set(fabric_names())
    assert not [name for name in fabric_names() if name.startswith(("nvlink", "pcie", "host"))]


def _own_device(folder: Path, **changes: str) -> Path:
    text = (catalogue.DATA / "devices" / "h200.toml").read_text(encoding="utf-8")
    for old, new in changes.items():
        text = re.sub(rf"(?m)^{old} = .*$", new, text, count=1)
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_own_device_is_one_file(tmp_path: Path) -> None:
    path = _own_device(tmp_path, name='name = "Z9"', memory_bytes="memory_bytes = 1_000")
    own = cluster(f"2x8x{path}")
    assert (own.device.name, own.device.memory_bytes, own.num_devices) == ("Z9", 1_000, 16)


def test_an_own_device_needs_no_sources(tmp_path: Path) -> None:
    path = _own_device(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").split("[[sources]]")[0], encoding="utf-8")
    assert not [source for source in cluster(str(path)).sources if source.startswith("H200")]


def test_an_own_device_may_bring_its_node_and_links(tmp_path: Path) -> None:
    for kind, name in (("nodes", "hgx-h200"), ("links", "nvlink-4")):
        text = (catalogue.DATA / kind / f"{name}.toml").read_text(encoding="utf-8")
        text = text.replace('inside = "nvlink-4"', 'inside = "nvlink-4.toml"').replace("3.5e+11", "1e9")
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    path = _own_device(tmp_path, node='node = "hgx-h200.toml"')
    assert cluster(str(path)).inside.bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"memory_share": "memory_shar = 0.8"}, UnknownKeyError, "memory_share"),
        ({"memory_share": ""}, BadValueError, "memory_share is missing"),
        ({"memory_bytes": 'memory_bytes = "80GB"'}, BadValueError, "'80GB'"),
        ({"overhead_bytes": "overhead_bytes = -1"}, BadValueError, "-1"),
        ({"bfloat16": "bfloat61 = 1e15"}, UnknownKeyError, "bfloat16"),
        ({"bfloat16": "bfloat16 = -1e15"}, BadValueError, "bfloat16"),
        ({"memory_bytes_per_s": "memory_bytes_per_s = 0.0"}, BadValueError, "positive"),
        ({"document": ""}, BadValueError, "document"),
        ({"node": 'node = "hgx-h201"'}, DeviceError, "hgx-h200"),
        ({"name": "name = "}, ConfigFileError, "not TOML"),
    ],
)
def test_mistakes_in_an_own_file_are_named(
    tmp_path: Path, changes: dict[str, str], error: type[Exception], says: str
) -> None:
    path = _own_device(tmp_path, **changes)
    with pytest.raises(error) as caught:
        cluster(str(path))
    assert says in f"{caught.value} {caught.value.hint}"  # type: ignore[attr-defined]


def test_a_missing_own_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"nothing\.toml"):
        cluster(f"8x{tmp_path}/nothing.toml")


@pytest.mark.parametrize("path", _of("nodes"), ids=lambda path: path.stem)
def test_figures_of_hosts_are_within_reason(path: Path) -> None:
    table = _load(path)
    assert 2 <= table["host_cores_per_device"] <= 64
    # one core updates 28 bytes per parameter: a node's memory is faster than that, and a device's share not by far
    assert table["host_memory_bytes_per_s"] > 28 * table["host_core_parameters_per_s"]
    assert table["host_memory_bytes_per_s"] / table["devices_per_node"] < 5e11


def test_a_user_s_node_may_leave_out_the_host_s_cpus(tmp_path: Path) -> None:
    own = {key: value for key, value in _load(catalogue.DATA / "nodes" / "hgx-h200.toml").items() if key != "sources"}
    kept = {key: value for key, value in own.items() if not key.startswith(("host_c", "host_memory_bytes_per_s"))}
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in kept.items()]
    (tmp_path / "node.toml").write_text("\n".join(lines), encoding="utf-8")
    device = (catalogue.DATA / "devices" / "h200.toml").read_text(encoding="utf-8")
    device = device.replace('node = "hgx-h200"', 'node = "node.toml"')
    (tmp_path / "gpu.toml").write_text(device, encoding="utf-8")
    found = cluster(f"2x{tmp_path / 'gpu.toml'}")
    assert (found.host_cores_per_device, found.host_memory_bytes_per_s) == (8.0, 1e11)
    measured = tmp_path / "measured.toml"
    measured.write_text("[nodes.hgx-h200]\nhost_cores_per_device = 16\n", encoding="utf-8")
    assert cluster(f"2x{tmp_path / 'gpu.toml'}", calibration=measured).host_cores_per_device == 16
