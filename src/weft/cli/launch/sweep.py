"""`--sweep section.key=a,b --sweep plan=a.toml,b.toml`: the arguments of each run of a sweep, the product of all."""

from __future__ import annotations

import itertools

from weft.core.errors import BadValueError


def expand_sweep(sweeps: list[str]) -> tuple[tuple[str, ...], ...]:
    """Arguments of each run of a sweep: the product of all `section.key=a,b` and `plan=a.toml,b.toml`."""
    if not sweeps:
        return ()
    products = itertools.product(*map(_choices, sweeps))
    return tuple(tuple(word for words in chosen for word in words) for chosen in products)


def _choices(sweep: str) -> list[tuple[str, str]]:
    key, separator, text = (part.strip() for part in sweep.partition("="))
    values = _values(text)
    if not separator or not values or (key != "plan" and "." not in key):
        raise BadValueError(
            f"--sweep {sweep!r} is neither section.key=value,value nor plan=file,file",
            hint="for example --sweep train.learning_rate=1e-3,3e-4 --sweep plan=a.toml,b.toml",
        )
    if key == "plan":
        return [("--plan", value) for value in values]
    return [("--set", f"{key}={value}") for value in values]


def _values(text: str) -> list[str]:
    """Values between commas; commas inside brackets and quotes belong to a value."""
    values, depth, quote, start = [], 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            values.append(text[start:place].strip())
            start = place + 1
    return [value for value in (*values, text[start:].strip()) if value]
