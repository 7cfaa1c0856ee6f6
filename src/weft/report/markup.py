"""HTML in small pieces. `text()` is the only door for a string from a file: everything else here is already markup.

`Markup` is a plain str by another name, so that the type checker tells the two apart.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any, NewType

Markup = NewType("Markup", str)

NOTHING = Markup("")
ABSENT = Markup('<span class="absent">not known</span>')


def text(value: object) -> Markup:
    """Any value as escaped text."""
    return Markup(html.escape(str(value), quote=True))


def join(pieces: Iterable[Markup]) -> Markup:
    return Markup("".join(pieces))


def tag(name: str, *content: Markup, **attributes: str) -> Markup:
    """`tag("p", text("x"), class_="note")`; a trailing underscore is dropped, others become dashes."""
    spelt = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{spelt}>{join(content)}</{name}>")


def section(*content: Markup, key: str, title: str) -> Markup:
    """A part of the page with its heading; nothing at all where it has no content."""
    if not any(content):
        return NOTHING
    return tag("section", tag("h2", text(title), id=f"{key}-title"), *content, id=key, aria_labelledby=f"{key}-title")


def grid(
    rows: Iterable[Sequence[Markup]],
    *,
    columns: Sequence[str],
    caption: str,
    numeric: Sequence[int] = (),
    class_: str = "",
) -> Markup:
    """A table in its own scroll box: a phone scrolls the table, not the page. The first cell heads its row."""
    classes = [' class="number"' if index in numeric else "" for index in range(len(columns))]
    heads = join(Markup(f'<th scope="col"{cls}>{text(name)}</th>') for name, cls in zip(columns, classes, strict=True))
    lines = join(_line(row, classes) for row in rows)
    table = f"<table><caption>{text(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"
    return tag("div", Markup(table), class_=f"scroll {class_}".strip(), tabindex="0", role="region", aria_label=caption)


def facts_list(pairs: Iterable[tuple[str, Markup]]) -> Markup:
    """Name and value in pairs."""
    return tag("dl", *(tag("div", tag("dt", text(name)), tag("dd", value)) for name, value in pairs), class_="facts")


def fold(summary: Markup, *content: Markup, is_open: bool = False) -> Markup:
    state = " open" if is_open else ""
    return Markup(f"<details{state}><summary>{summary}</summary>{join(content)}</details>")


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
