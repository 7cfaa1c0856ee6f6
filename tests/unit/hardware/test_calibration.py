"""Own measurements: where the file is found, what it replaces, what it may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.core.errors import BadValueError, ConfigFileError, UnknownKeyError, WeftError
from weft.hardware import cluster

MEASURED = """
measured = "2026-11-15, one node"

[devices.h200]
memory_share = 0.5
overhead_bytes = 123

[devices.h200.rates]
bfloat16 = { best = 0.61, half_flops = 1e9 }

[links.nvlink-4]
bytes_per_s = 3e11

[links.ethernet-100]
bytes_per_s = 8e9
latency_s = 1e-3

[nodes.hgx-h200]
nvme_bytes_per_s = 7.0
"""


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A calibration file of the person who runs the tests must not change their outcome.
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEFT_CALIBRATION", raising=False)


def _write(path: Path, text: str = MEASURED) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_measured_figures_replace_the_catalogues_and_the_rest_stays(tmp_path: Path) -> None:
    plain = cluster("2x8xH200")
    measured = cluster("2x8xH200", calibration=_write(tmp_path / "own.toml"))
    assert (measured.device.memory_share, measured.device.overhead_bytes) == (0.5, 123)
    assert measured.device.rates["bfloat16"].best == 0.61
    assert measured.device.rates["float8"] == plain.device.rates["float8"]
    assert measured.device.memory_bytes == plain.device.memory_bytes
    assert (measured.inside.bytes_per_s, measured.inside.latency_s) == (3e11, plain.inside.latency_s)
    assert measured.between == plain.between
    assert measured.nvme_bytes_per_s == 7.0
    assert measured.calibrated
    assert not plain.calibrated
    assert measured.sources[-1] == f"calibration: {tmp_path / 'own.toml'} (2026-11-15, one node)"


def test_a_port_of_the_node_is_measured_as_a_whole(tmp_path: Path) -> None:
    measured = cluster("2x8xA100@ethernet-100", calibration=_write(tmp_path / "own.toml"))
    assert (measured.between.bytes_per_s, measured.between.latency_s) == (1e9, 1e-3)


def test_a_file_about_other_devices_calibrates_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path / "own.toml")
    assert not cluster("8xA100", calibration=path).calibrated
    assert cluster("8xA100", calibration=path) == cluster("8xA100")


def test_the_file_in_the_current_folder_is_found(tmp_path: Path) -> None:
    assert not cluster("H200").calibrated
    _write(tmp_path / "weft.calibration.toml")
    assert cluster("H200").device.memory_share == 0.5


def test_the_environment_comes_before_the_folder_and_the_argument_before_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share_file(name: str, share: float) -> Path:
        return _write(tmp_path / name, f"[devices.H200]\nmemory_share = {share}\n")

    share_file("weft.calibration.toml", 0.1)
    monkeypatch.setenv("WEFT_CALIBRATION", str(share_file("environment.toml", 0.2)))
    given = share_file("given.toml", 0.3)
    assert cluster("H200").device.memory_share == 0.2
    assert cluster("H200", calibration=given).device.memory_share == 0.3


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("[device.H200]\n", UnknownKeyError, "'devices'"),
        ("[devices.H200]\nmemory_shar = 0.5\n", UnknownKeyError, "memory_share"),
        ("[devices.H200]\nmemory_share = -0.5\n", BadValueError, "-0.5"),
        ("[devices.H200]\nmemory_share = 'much'\n", BadValueError, "'much'"),
        ("[devices.H200.rates]\nbfloat16 = 0.5\n", BadValueError, "half_flops"),
        ("[devices.H200.rates]\nbfloat16 = { best = 1.5, half_flops = 1e9 }\n", BadValueError, "at most 1"),
        ("[devices.H200]\nnode = 'hgx-a100'\n", BadValueError, "cannot replace node"),
        ("[devices]\nH200 = 3\n", BadValueError, "[devices.NAME]"),
        ("[devices.H2000]\nmemory_share = 0.5\n", UnknownKeyError, "'h200'"),
        ("[links.nvlink-44]\nlatency_s = 0.5\n", UnknownKeyError, "'nvlink-4'"),
        ("[devices", ConfigFileError, "not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, error: type[WeftError], says: str) -> None:
    path = _write(tmp_path / "own.toml", text)
    with pytest.raises(error) as caught:
        cluster("H200", calibration=path)
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_a_missing_file_that_was_asked_for_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError):
        cluster("H200", calibration=tmp_path / "nothing.toml")
