"""Generated shapes of named models equal those that are derived now; planning by name never imports torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.core.shape_json import shape_from_json, shape_to_json
from weft.models.shape.lookup import shape_from_type
from weft.zoo.catalogue import config_of, entries, shapes_file

_ROOT = Path(__file__).parents[3]
_ALL = {name: (file, entry) for file, models in entries().items() for name, entry in models.items()}
_FEW = ("llama-3-8b", "gpt2", "mixtral-8x7b", "gemma-2-9b")


def require_same(name: str) -> None:
    """After a change of models/shape: python scripts/generate_shapes.py."""
    file, entry = _ALL[name]
    written = json.loads(shapes_file(file).read_text(encoding="utf-8"))[name]
    derived = shape_from_type(str(entry["type"]), config_of(entry), name=name)
    assert json.loads(json.dumps(shape_to_json(derived))) == written
    assert shape_from_json(written) == derived


@pytest.mark.parametrize("name", _FEW)
def test_generated_shapes_are_those_of_the_installed_transformers(name: str) -> None:
    require_same(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(_ALL) - set(_FEW)))
def test_every_generated_shape(name: str) -> None:
    require_same(name)


def test_every_named_model_has_a_shape() -> None:
    for file, models in entries().items():
        assert list(json.loads(shapes_file(file).read_text(encoding="utf-8"))) == list(models)


def test_planning_by_name_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, weft.zoo; weft.zoo.named('llama-3-8b'); weft.zoo.named('deepseek-v3');"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=_ROOT)
    assert done.stdout.strip() == "[]"
