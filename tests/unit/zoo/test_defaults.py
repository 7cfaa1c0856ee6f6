"""The generated defaults equal the installed transformers; planning never imports it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from weft.zoo.config import type_data

_ROOT = Path(__file__).parents[3]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", _ROOT / "scripts" / "generate_zoo_defaults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_defaults_are_those_of_the_installed_transformers() -> None:
    """After raising transformers: python scripts/generate_zoo_defaults.py, then see what test_counts says."""
    import transformers

    module = generator()
    written = json.loads(module.TARGET.read_text(encoding="utf-8"))
    recorded = written.pop("")["transformers"]
    if transformers.__version__ != recorded:
        pytest.skip(f"the defaults are those of transformers {recorded}, installed is {transformers.__version__}")
    assert json.loads(json.dumps(module.collect())) == written


def test_one_line_holds_one_type() -> None:
    """`type_data` reads lines, not the whole JSON: both must agree."""
    whole = json.loads(generator().TARGET.read_text(encoding="utf-8"))
    assert {name: type_data(name) for name in whole} == whole
    assert type_data("no such type") == {}


def test_planning_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, weft.zoo; weft.zoo.named('llama-3-8b'); weft.zoo.named('deepseek-v3');"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=_ROOT)
    assert done.stdout.strip() == "[]"
