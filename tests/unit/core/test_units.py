"""Units: numbers as people read them."""

from weft.core.units import format_bytes, format_count, format_seconds


def test_sizes_counts_and_times_read_well() -> None:
    assert [format_bytes(n) for n in (512, 2048, 3 * 2**20, 5 * 2**30)] == ["512 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
    assert [format_count(n) for n in (999, 1500, 1_235_000_000)] == ["999", "1.50 K", "1.24 B"]
    assert [format_seconds(s) for s in (0.25, 12.34, 75, 3725)] == ["250ms", "12.3s", "1m15s", "1h02m"]
