"""What must be equal on all hosts: found on this one, and named with host and value where it differs."""

from pathlib import Path

import pytest
import torch
import transformers

import weft
from weft.launch.host_facts import describe_differences, own_facts


def test_facts_have_versions_source_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("a = 1\n")
    facts = own_facts(["run.toml", "plan.toml"])
    assert (facts["weft"], facts["torch"]) == (weft.__version__, torch.__version__)
    assert facts["transformers"] == transformers.__version__
    assert facts["file plan.toml"] == "missing"
    before = facts["file run.toml"]
    Path("run.toml").write_text("a = 2\n")
    assert own_facts(["run.toml"])["file run.toml"] not in (before, "missing")
    assert own_facts()["weft's source"] == facts["weft's source"]


def test_only_hosts_that_differ_are_named_with_both_values() -> None:
    facts = {
        "a": {"torch": "2.13.0", "python": "3.12.1"},
        "b": {"torch": "2.13.0", "python": "3.12.1"},
        "c": {"torch": "2.11.0", "python": "3.11.9"},
        "d": {"torch": "2.13.0"},
    }
    assert describe_differences(facts, reference="a") == [
        "c differs from a: torch 2.11.0, not 2.13.0; python 3.11.9, not 3.12.1",
        "d differs from a: python missing, not 3.12.1",
    ]
