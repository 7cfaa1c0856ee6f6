"""Builds the documentation as a web site with search and an API reference from docstrings. Needs the extra `site`.

    python scripts/site.py [FOLDER]     (default: site)

The pages keep their places relative to each other, so links that work in the repository work on the site. Links to
files that are no pages (source code, tests) become plain text. Nothing is loaded from other hosts.
"""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

import weft

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
SHOWN = ("docs", "examples", "benchmarks/results")
API = "docs/reference/api.md"
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<to>(?!https?:|#)[^)\s]+)\)")


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "pages"
        _gather(source)
        config = Path(scratch) / "mkdocs.yml"
        config.write_text(yaml.safe_dump(_config(source), sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
        subprocess.run([*command, "--config-file", str(config), "--site-dir", str(out.absolute())], check=True)


def _gather(source: Path) -> None:
    """Copy every page and what pages show, without links that leave them; write the API page."""
    for folder in SHOWN:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("*.py", "runs", "__pycache__"))
    for name in TOP:
        shutil.copy(ROOT / name, source / name)
    (source / API).write_text(_api_page(), encoding="utf-8")
    for page in source.rglob("*.md"):
        kept = functools.partial(_kept, page=page, source=source)
        page.write_text(_LINK.sub(kept, page.read_text("utf-8")), encoding="utf-8")


def _kept(link: re.Match[str], *, page: Path, source: Path) -> str:
    """The link if it leads to a file of the site: a folder's link to its README, anything else to plain text."""
    path, _, anchor = link["to"].partition("#")
    target = (page.parent / path).resolve()
    if target.is_dir() and (target / "README.md").is_file():
        path, target = f"{path.rstrip('/')}/README.md", target / "README.md"
    if not target.is_file() or not target.is_relative_to(source.resolve()):
        return link["text"]
    return f"[{link['text']}]({path}{'#' + anchor if anchor else ''})"


def _api_page() -> str:
    """Every public name with its docstring."""
    lines = ["# The Python API, by name", ""]
    for name in sorted(weft.__all__):
        if inspect.isclass(value := getattr(weft, name)) or inspect.isfunction(value):
            lines += [f"::: {value.__module__}.{value.__qualname__}", ""]
    return "\n".join(lines)


def _config(source: Path) -> dict[str, object]:
    def pages(folder: str, *first: str) -> list[str]:
        found = sorted(path.relative_to(source).as_posix() for path in (source / folder).rglob("*.md"))
        return [*first, *(page for page in found if page not in first)]

    nav: list[object] = [
        {"Home": "README.md"},
        {"Contents": "docs/README.md"},
        {"Start": pages("docs/start")},
        {"Guides": pages("docs/guides")},
        {"Concepts": pages("docs/concepts")},
        {"Reference": pages("docs/reference", API)},
        {"Examples": pages("examples", "examples/README.md")},
        {"Results": pages("benchmarks/results")},
        {"Project": ["docs/status.md", "docs/log.md", *TOP[1:]]},
    ]
    mkdocstrings = {
        "handlers": {
            "python": {
                "paths": [str(ROOT / "src")],
                "options": {"show_source": False, "show_root_heading": True, "filters": ["!^_"]},
            }
        }
    }
    return {
        "site_name": "weft",
        "docs_dir": str(source),
        "use_directory_urls": False,
        "theme": {
            "name": "material",
            "font": False,  # else from another host
            "features": ["navigation.tabs", "navigation.top", "search.highlight", "content.code.copy"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "plugins": ["search", {"mkdocstrings": mkdocstrings}],
        "markdown_extensions": [
            "tables",
            "fenced_code",
            "toc",
            "attr_list",
            "pymdownx.highlight",
            "pymdownx.superfences",
        ],
        "validation": {"links": {"anchors": "info"}},
        "nav": nav,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site")
