"""Units: numbers as people read them."""

import pytest

from weft.core.errors import BadValueError
from weft.core.units import format_bytes, format_count, format_seconds, parse_bytes


def test_sizes_counts_and_times_read_well() -> None:
    assert [format_bytes(n) for n in (512, 2048, 3 * 2**20, 5 * 2**30)] == ["512 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
    assert [format_count(n) for n in (999, 1500, 1_235_000_000)] == ["999", "1.50 K", "1.24 B"]
    assert [format_seconds(s) for s in (0.25, 12.34, 75, 3725)] == ["250ms", "12.3s", "1m15s", "1h02m"]


def test_sizes_are_read_as_people_write_them() -> None:
    sizes = {"128GB": 128 * 10**9, "128 GiB": 128 * 2**30, "2TB": 2 * 10**12, "1.5gib": 1536 * 2**20, "512": 512}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GB", "12XB", "-1GB", "1 2GB"):
        with pytest.raises(BadValueError, match=r"--host-memory .* not a size"):
            parse_bytes(text, name="--host-memory")
