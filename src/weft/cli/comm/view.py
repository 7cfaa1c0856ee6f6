"""The text of `weft comm bench`: a table, and time against size as a picture of characters."""

from __future__ import annotations

from math import log10
from typing import Any

from weft.core.units import format_bytes

_WIDTH, _HEIGHT = 64, 16
_LETTERS = "ABCDEFGHIJKLM"


def text_of(answer: dict[str, Any]) -> str:
    parts = []
    for collective in dict.fromkeys(row["collective"] for row in answer["rows"]):
        rows = [row for row in answer["rows"] if row["collective"] == collective]
        parts += [f"{collective}, {rows[0]['ranks']} ranks", _table(rows), _picture(rows)]
    fit = answer["fit"]
    beta = fit["beta_s_per_byte"]
    rate = f"{1 / beta / 1e9:.3g} GB/s each way" if beta else "bandwidth unknown: times do not grow with the size"
    parts.append(f"link: latency {_ms(fit['alpha_s'])}, {rate} ({answer['machine']})")
    return "\n\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    head = f"{'size':>10}  {'algorithm':<13}{'time':>10}{'algbw':>12}{'busbw':>12}{'sent/S':>8}{'formula':>8}  equal"
    lines = [head]
    for row in rows:
        size = row["bytes"]
        sent = "-" if row["bytes_sent_per_rank"] is None else f"{row['bytes_sent_per_rank'] / size:.2f}"
        lines.append(
            f"{format_bytes(size):>10}  {row['algorithm']:<13}{_ms(row['seconds']):>10}"
            f"{row['algorithm_bytes_per_s'] / 1e9:>7.3f} GB/s{row['bus_bytes_per_s'] / 1e9:>7.3f} GB/s"
            f"{sent:>8}{row['predicted_bytes_per_rank'] / size:>8.2f}  {'yes' if row['equal'] else 'NO'}"
        )
    return "\n".join(lines)


def _picture(rows: list[dict[str, Any]]) -> str:
    """Seconds against bytes, both logarithmic; a letter per algorithm, the later one on top."""
    xs = [log10(row["bytes"]) for row in rows]
    ys = [log10(row["seconds"]) for row in rows]
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    marks = _marks(names)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for row, x, y in zip(rows, xs, ys, strict=True):
        column = round((x - min(xs)) / ((max(xs) - min(xs)) or 1) * (_WIDTH - 1))
        line = round((max(ys) - y) / ((max(ys) - min(ys)) or 1) * (_HEIGHT - 1))
        grid[line][column] = marks[row["algorithm"]]
    top, bottom = _ms(10 ** max(ys)), _ms(10 ** min(ys))
    labels = [top, *[""] * (_HEIGHT - 2), bottom]
    lines = [f"{label:>9} |{''.join(line).rstrip()}" for label, line in zip(labels, grid, strict=True)]
    smallest, largest = format_bytes(round(10 ** min(xs))), format_bytes(round(10 ** max(xs)))
    axis = " " * 11 + smallest + largest.rjust(_WIDTH - len(smallest))
    return "\n".join([*lines, axis, " " * 11 + ", ".join(f"{marks[name]} {name}" for name in names)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _marks(names: list[str]) -> dict[str, str]:
    """A letter each: the first of its own that is free."""
    found: dict[str, str] = {}
    for name in names:
        free = (letter for letter in (*name.upper(), *_LETTERS) if letter.isalpha() and letter not in found.values())
        found[name] = next(free, "?")
    return found
