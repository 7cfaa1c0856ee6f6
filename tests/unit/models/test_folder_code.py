"""Python inside a model folder (auto_map) is never run, and nobody is asked whether it may be."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.core.errors import ModelError, TokenizerError
from weft.core.run_spec import ModelSpec
from weft.data import open_tokenizer
from weft.models.build import build_config, build_skeleton

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
MAP = {
    "AutoConfig": "own.OwnConfig",
    "AutoModelForCausalLM": "own.OwnModel",
    "AutoTokenizer": ["own.OwnTokenizer", None],
}
CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
raise SystemExit("this must not run")
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The questions that were put on the terminal; each would be answered with yes."""
    questions: list[str] = []

    def answer(question: str = "") -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return questions


def folder_of(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "own.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps({"auto_map": MAP, "vocab_size": 320, **SIZES, **config}))
    return folder


def nothing_ran(tmp_path: Path) -> bool:
    return not list(tmp_path.rglob("ran")) and not (tmp_path / "modules").exists()


@pytest.mark.parametrize("config", [{"model_type": "own_model"}, {}])
def test_a_type_that_only_its_folder_knows_is_refused_by_name(
    config: dict[str, Any], tmp_path: Path, asked: list[str]
) -> None:
    folder = folder_of(tmp_path / "own", **config)
    with pytest.raises(ModelError, match="does not run code from a model folder") as caught:
        build_config(ModelSpec(path=str(folder)), vocab_size=257)
    assert "trust_remote_code" in caught.value.hint
    assert "weft.Engine" in caught.value.hint
    assert not asked
    assert nothing_ran(tmp_path)


def test_a_type_that_transformers_knows_is_built_with_transformers_own_code(tmp_path: Path, asked: list[str]) -> None:
    folder = folder_of(tmp_path / "own", model_type="llama")
    model = build_skeleton(build_config(ModelSpec(path=str(folder)), vocab_size=257))
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    assert not asked
    assert nothing_ran(tmp_path)


def test_a_tokenizer_with_code_of_its_own_is_refused(tmp_path: Path, asked: list[str]) -> None:
    folder = folder_of(tmp_path / "own", model_type="own_model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": MAP, "tokenizer_class": "OwnTokenizer"}))
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        _ = open_tokenizer(str(folder)).vocab_size
    assert not asked
    assert nothing_ran(tmp_path)


def test_every_call_of_an_auto_class_refuses_such_code_explicitly() -> None:
    missing = []
    for file in Path(weft.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                refuses = any(word.arg == "trust_remote_code" for word in node.keywords)
                if owner.startswith("Auto") and node.func.attr.startswith("from_") and not refuses:
                    missing.append(f"{file.name}:{node.lineno}")
    assert not missing
