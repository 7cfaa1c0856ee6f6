"""`Page`: the one skeleton of all pages (header, navigation, tiles, sections), its template, the writing of the file.

A page loads nothing from the network. Its policy forbids that and allows only the scripts whose digests it lists, so
a name that slipped through the escaping cannot run. The same content gives the same bytes: no clock, no random ids.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from weft.core.errors import RunFolderError
from weft.report.markup import NOTHING, Markup, chip, join, script_json, tag, text
from weft.report.palette import css_variables, dark_of_light

_STATUS_KIND = {"finished": "good", "done": "good", "pass": "good", "stopped": "warn", "failed": "bad", "FAIL": "bad"}
_NO_SCRIPT = Markup(
    '<noscript><p class="absent">The charts need JavaScript. '
    "The tables and captions below hold their numbers.</p></noscript>"
)


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """A part of the page; left out of the page and its navigation where it has no content."""

    key: str
    title: str
    content: Markup
    link: str = ""  # the words of the navigation where they are shorter than the title


@dataclass(frozen=True, kw_only=True)
class Page:
    """`heading`, `status` and `verdict` open the page; `remarks` list problems of the records."""

    title: str
    heading: str
    status: str
    verdict: str
    sections: Sequence[PageSection]
    tiles: Sequence[Markup] = ()
    remarks: Sequence[str] = ()
    has_charts: bool = True


def write_page(page: Page, target: Path, *, hint: str) -> Path:
    """Write the page to `target` and return it; `hint` is for a file that cannot be written."""
    draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(render(page), encoding="utf-8", newline="\n")
        draft.replace(target)  # in one move: a reader never sees half a page
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise RunFolderError(f"{target} cannot be written: {error.strerror}", hint=hint) from None
    return target


def render(page: Page) -> str:
    """The page as text."""
    sections = [section for section in page.sections if section.content]
    scripts = [_plotly_script(), _script(_resource("draw.js"))] if page.has_charts else []
    links = [tag("a", text(section.link or section.title), href=f"#{section.key}") for section in sections]
    return Template(_resource("page.html")).substitute(
        policy=_policy(scripts),
        title=text(f"{page.title} · weft"),
        colours=css_variables(),
        style=_resource("style.css"),
        head=_head(page),
        links=" ".join(links),
        notice=_NO_SCRIPT if page.has_charts else NOTHING,
        main=join([tag("div", *page.tiles, class_="tiles") if page.tiles else NOTHING, *map(_section, sections)]),
        scripts=_scripts(scripts),
    )


def _head(page: Page) -> Markup:
    word = "no record of the end" if page.status == "unknown" else page.status
    status = chip(word, kind=f"status {_STATUS_KIND.get(page.status, 'plain')}")
    head = [tag("h1", text(page.heading), Markup(" "), status), tag("p", text(page.verdict), class_="verdict")]
    if page.remarks:
        items = (tag("li", text(remark)) for remark in page.remarks)
        title = tag("strong", text("Remarks on this folder"))
        head.append(tag("aside", title, tag("ul", *items), aria_label="Remarks"))
    return join(head)


def _section(section: PageSection) -> Markup:
    heading = tag("h2", text(section.title), id=f"{section.key}-title")
    return tag("section", heading, section.content, id=section.key, aria_labelledby=f"{section.key}-title")


def _scripts(scripts: Sequence[str]) -> str:
    if not scripts:
        return ""
    palette = tag("script", script_json(dark_of_light()), type="application/json", id="palette")
    return "\n".join([palette, *(f"<script>{script}</script>" for script in scripts)])


def _plotly_script() -> str:
    return _script(_resource("vendor/plotly.min.js"))


def _resource(name: str) -> str:
    return files("weft.report").joinpath(name).read_text(encoding="utf-8")


def _script(source: str) -> str:
    # A browser reads \r\n as \n before it takes the digest; a script with \r would be refused.
    return source.replace("\r\n", "\n").replace("\r", "\n")


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    script_rule = f"script-src {allowed}; " if scripts else ""
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; {script_rule}{rest}"
