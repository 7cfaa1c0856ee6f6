"""Links between pages resolve, every page can be reached from the README, and no page knows a machine's paths."""

from __future__ import annotations

import re

import pytest
from blocks import ROOT, all_pages

_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:work|root|home|Users|tmp|mnt)\b")


def links(page: str) -> list[str]:
    """The targets of a page's links, as paths of the repository."""
    found = _LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    inside = [target.partition("#")[0] for target in found if not target.startswith(("http://", "https://", "#"))]
    return [str((ROOT / page).parent.joinpath(target).resolve().relative_to(ROOT)) for target in inside]


@pytest.mark.parametrize("page", all_pages())
def test_links_resolve(page: str) -> None:
    assert not [target for target in links(page) if not (ROOT / target).is_file()]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), ["README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.endswith(".md"):
            reached.add(page)
            ahead += links(page)
    assert not set(all_pages()) - reached


@pytest.mark.parametrize("page", all_pages())
def test_no_machine_paths(page: str) -> None:
    assert not _MACHINE_PATH.findall((ROOT / page).read_text(encoding="utf-8"))


def test_a_machine_path_would_be_seen() -> None:
    assert _MACHINE_PATH.findall("see /home/me/x and `/tmp`")
    assert not _MACHINE_PATH.findall("/shared/runs, ~/.cache/weft, docs/home")
