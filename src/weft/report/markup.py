"""HTML elements of all pages: tags, tables, tiles, folds. `text()` escapes; every string from a file goes through it.

`Markup` is a plain str by another name, so that the type checker separates markup from text.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NewType, TypeVar

from weft.report.fields import number

Markup = NewType("Markup", str)
Item = TypeVar("Item")

NOTHING = Markup("")
ABSENT = Markup('<span class="absent">not known</span>')
DASH = Markup("–")


def text(value: object) -> Markup:
    """Any value as escaped text."""
    return Markup(html.escape(str(value), quote=True))


def shown(value: object, show: Callable[[float], str], *, missing: Markup = ABSENT) -> Markup:
    """A number formatted by `show`; `missing` where the value is not a finite number."""
    known = number(value)
    return missing if known is None else text(show(known))


def join(pieces: Iterable[Markup]) -> Markup:
    return Markup("".join(pieces))


def tag(name: str, *content: Markup, **attributes: str) -> Markup:
    """`tag("p", text("x"), class_="note")`; a trailing underscore is dropped, others become dashes."""
    spelt = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{spelt}>{join(content)}</{name}>")


def absent(sentence: str) -> Markup:
    """A sentence in place of a chart or a table, so that "nothing recorded" never reads as "nothing wrong"."""
    return tag("p", text(sentence), class_="absent")


def tile(name: str, value: float | None, *, show: Callable[[float], str], note: str) -> Markup:
    return tag(
        "div",
        tag("span", text(name), class_="name"),
        tag("span", shown(value, show), class_="value"),
        tag("span", text(note), class_="muted"),
        class_="tile",
    )


def table_of(
    items: Iterable[Item],
    columns: Mapping[str, Callable[[Item], Markup]],
    *,
    caption: str,
    numeric: Sequence[int] | None = None,
) -> Markup:
    """A table with one row per item and one function per column; all columns but the first are numbers by default."""
    rows = ([cell(item) for cell in columns.values()] for item in items)
    right_aligned = range(1, len(columns)) if numeric is None else numeric
    return grid(rows, columns=tuple(columns), caption=caption, numeric=right_aligned)


def grid(
    rows: Iterable[Sequence[Markup]], *, columns: Sequence[str], caption: str, numeric: Sequence[int] = ()
) -> Markup:
    """A table in its own scroll box: a phone scrolls the table, not the page. The first cell is the row's header."""
    classes = [' class="number"' if index in numeric else "" for index in range(len(columns))]
    heads = join(Markup(f'<th scope="col"{cls}>{text(name)}</th>') for name, cls in zip(columns, classes, strict=True))
    lines = join(_line(row, classes) for row in rows)
    table = f"<table><caption>{text(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"
    return tag("div", Markup(table), class_="scroll", tabindex="0", role="region", aria_label=caption)


def facts_list(pairs: Iterable[tuple[str, object]], *, otherwise: str) -> Markup:
    """Names (underscores become spaces) and values; the sentence `otherwise` where no value is known."""
    known = [(str(name).replace("_", " "), text(value)) for name, value in pairs if value is not None]
    items = (tag("div", tag("dt", text(name)), tag("dd", value)) for name, value in known)
    return tag("dl", *items, class_="facts") if known else absent(otherwise)


def fold(summary: Markup, *content: Markup, is_open: bool = False) -> Markup:
    state = " open" if is_open else ""
    return Markup(f"<details{state}><summary>{summary}</summary>{join(content)}</details>")


def document(name: str, content: str | None) -> Markup:
    """A file of the folder, verbatim."""
    if content is None:
        return absent(f"{name} is missing.")
    return fold(tag("code", text(name)), tag("pre", tag("code", text(content)), tabindex="0"), is_open=True)


def chip(label: str, *, kind: str = "plain") -> Markup:
    return tag("span", text(label), class_=f"chip {kind}")


def script_json(value: Any) -> Markup:
    """JSON that no string inside it can end: `</script>` and `<!--` lose their angle bracket."""
    plain = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return Markup(plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _line(cells: Sequence[Markup], classes: Sequence[str]) -> Markup:
    first, *rest = cells
    head = f'<th scope="row"{classes[0]}>{first}</th>'
    return Markup(
        f"<tr>{head}{''.join(f'<td{cls}>{cell}</td>' for cell, cls in zip(rest, classes[1:], strict=True))}</tr>"
    )
