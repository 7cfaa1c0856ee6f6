"""The distribution's name: `weft` on PyPI is another project, so install hints name ours, with extras that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from weft.core.errors import DISTRIBUTION, MissingExtraError
from weft.core.extras import NEEDED_FOR

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted((ROOT / "src" / "weft").rglob("*.py"))
_FOREIGN = re.compile(r"(?:pip install|uv add|uv pip install)[^\n]*['\" ]weft(?![-\w/])")


def test_the_name_is_ours_and_the_command_stays() -> None:
    assert PROJECT["name"] == DISTRIBUTION != "weft"
    assert PROJECT["scripts"] == {"weft": "weft.cli.main:main"}


def test_extras_that_errors_ask_for_exist() -> None:
    raised_elsewhere = [path.name for path in SOURCES if "MissingExtraError(" in path.read_text(encoding="utf-8")]
    assert sorted(raised_elsewhere) == ["errors.py", "extras.py"]
    assert {extra for _, extra in NEEDED_FOR.values()} <= set(PROJECT["optional-dependencies"])
    assert MissingExtraError("x", extra="data").hint == f"pip install '{DISTRIBUTION}[data]'"


def test_no_install_command_names_the_other_project() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "pyproject.toml"]
    assert not [path for path in (*SOURCES, *pages) if _FOREIGN.search(path.read_text(encoding="utf-8"))]


def test_the_pattern_sees_the_other_project() -> None:
    assert _FOREIGN.search("pip install 'weft[ray]'")
    assert _FOREIGN.search("pip install weft")
    assert not _FOREIGN.search("pip install 'weft-train[ray]'")


def test_workflows_and_issue_templates_parse_and_run_scripts_that_exist() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    assert len(files) >= 5
    texts = [path.read_text(encoding="utf-8") for path in files]
    assert all(isinstance(yaml.safe_load(text), dict) for text in texts)
    named = {name for text in texts for name in re.findall(r"scripts/[\w-]+", text)}
    assert named
    assert all((ROOT / name).is_file() for name in named)
