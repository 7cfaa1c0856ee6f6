"""The web site of the documentation has every page, no broken link, and loads nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import ROOT, all_pages

_LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*rel=\"stylesheet\"[^>]*href=\"https?://"
)


@pytest.mark.extended
def test_the_site_has_every_page_and_an_api_reference(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "site.py"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stderr
    site = tmp_path / "site"
    for page in all_pages():
        name = Path(page)
        html = site / (name.with_name("index.html") if name.name == "README.md" else name.with_suffix(".html"))
        assert html.is_file(), page
    api = (site / "docs" / "reference" / "api.html").read_text(encoding="utf-8")
    assert 'id="weft.engine.engine.Engine.step"' in api
    assert 'id="weft.core.plan.Plan"' in api
    assert not [path for path in site.rglob("*.html") if _LOADED.search(path.read_text(encoding="utf-8"))]
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any("secondary_shard" in entry["text"] for entry in index["docs"])
