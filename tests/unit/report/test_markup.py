"""Markup: the one door for strings is closed to tags."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.report.markup import grid, join, script_json, table_of, tag, text
from weft.report.page import Page, PageSection, render


@settings(max_examples=60)
@given(st.text(alphabet=st.sampled_from("<>&\"'/!-script\u2028é"), max_size=40))
def test_no_string_leaves_its_quotes(value: str) -> None:
    assert not set(text(value)) & set("<>\"'")
    inside = script_json({"name": value})
    assert not set(inside) & set("<>&\u2028")
    assert json.loads(inside) == {"name": value}
    assert tag("p", title=value).count('"') == 2


def test_a_section_without_content_is_nothing_and_has_no_link() -> None:
    sections = [
        PageSection(key=key, title=key.upper(), content=text(content)) for key, content in (("x", ""), ("y", "z"))
    ]
    page = render(Page(title="t", heading="h", status="done", verdict="v", sections=sections, has_charts=False))
    assert 'id="x"' not in page
    assert page.count("#x") == 0
    assert '<a href="#y">Y</a>' in page
    assert '<section id="y" aria-labelledby="y-title"><h2 id="y-title">Y</h2>z</section>' in page
    assert "<script" not in page


def test_a_table_names_its_columns_and_rows() -> None:
    markup = grid([[text("a"), text("1")]], columns=("term", "bytes"), caption="C & D", numeric=(1,))
    assert '<th scope="col" class="number">bytes</th>' in markup
    assert '<th scope="row">a</th><td class="number">1</td>' in markup
    assert "<caption>C &amp; D</caption>" in markup
    columns = {"term": lambda pair: text(pair[0]), "bytes": lambda pair: text(pair[1])}
    assert table_of([("a", 1)], columns, caption="C & D") == markup
    assert join([text("a"), text("b")]) == "ab"
