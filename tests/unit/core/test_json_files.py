"""Whatever a JSON file holds, its reader answers with weft's own error, or takes it: never a stack trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.checkpoint.manifest import ManifestError, parse
from weft.core.config import apply_settings, read_toml
from weft.core.errors import ConfigFileError, ModelError, WeftError
from weft.core.json_files import MOST_NESTED, parse_json, read_json_table
from weft.core.run_spec import ModelSpec
from weft.data.documents import parse_row
from weft.data.store import DamagedStoreError, StoreHeader
from weft.models.build import build_config
from weft.models.pretrained import _refuse_quantised
from weft.models.shape.lookup import shape_from_path
from weft.models.weight_files import _promised_names
from weft.report.folder import read_json, step_fields
from weft.server.durable.snapshot import _open
from weft.server.wire.frame import Frame, Op
from weft.train.folder.metrics_file import MetricsFile
from weft.train.folder.run_folder import RunFolder

DEEP = "[" * 100_000 + "]" * 100_000
BELOW_PYTHONS_LIMIT = '{"a":' * 400 + "1" + "}" * 400  # json takes it, and a copy or a printed form does not
ODD = [
    "", " ", "null", "5", '"text"', "[]", "[1, 2]", "{}", "NaN", "1e999", "9" * 5000, '{"a": NaN}', '{"a"', "\ufeff{}",
    DEEP, BELOW_PYTHONS_LIMIT, '{"config": ' + DEEP + "}", '{"\\ud800": 1}',
]  # fmt: skip
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TYPES = ("llama", "gemma3", "mixtral", "gpt2", "deepseek_v3", "mamba2", "unheard_of")
KEYS = (*SIZES, "num_key_value_heads", "head_dim", "text_config", "rope_scaling", "layer_types", "per_layer_config")
CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 300, **SIZES}


def read_config(path: Path) -> None:
    build_config(ModelSpec(path=str(path.parent)), vocab_size=257)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a model's config": ("config.json", read_config),
    "a planned config": ("config.json", shape_from_path),
    "quantisation": ("config.json", lambda path: _refuse_quantised(path.parent)),
    "a weight index": ("model.safetensors.index.json", lambda path: _promised_names(path.parent)),
    "a ledger": ("ledger.json", lambda path: RunFolder(path.parent).read_ledger()),
    "a ledger drawn": ("ledger.json", lambda path: read_json(path, [])),
    "metrics": ("metrics.jsonl", lambda path: RunFolder(path.parent).metrics.drop_after(3)),
    "a line drawn": ("metrics.jsonl", lambda path: step_fields(path.read_text(errors="replace"))),
    "a row of text": ("rows.jsonl", lambda path: parse_row(path.read_bytes(), where="rows.jsonl:1")),
    "a server's snapshot": ("manifest.json", lambda path: _open(path.parent)),
    "a control frame": ("frame", lambda path: Frame(Op.CONTROL, (), path.read_bytes()).json()),
}
OWN_ERRORS = (WeftError, ManifestError, DamagedStoreError)


def answers(read: Callable[[Path], object], path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with suppress(*OWN_ERRORS):
        read(path)


@pytest.mark.parametrize("name", READERS)
def test_odd_texts_are_read_or_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    for text in [*ODD, json.dumps(CONFIG)]:
        answers(read, tmp_path / file, text.encode("utf-8", errors="surrogatepass"))
    for data in (b"\xff\xfe\x00", b"\xef\xbb\xbf{}", '{"a": "ä"}'.encode("latin-1"), b"\x00" * 20):
        answers(read, tmp_path / file, data)


@pytest.mark.parametrize("text", ODD)
def test_odd_headers_and_manifests_are_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        parse(text.encode())
    with pytest.raises(DamagedStoreError):
        StoreHeader.from_bytes(text.encode())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_config_with_any_value_anywhere_has_a_shape_or_an_error(data: st.DataObject, tmp_path: Path) -> None:
    model_type = data.draw(st.sampled_from(TYPES))
    changed = {data.draw(st.sampled_from(KEYS)): data.draw(values) for _ in range(2)}
    answers(
        shape_from_path, tmp_path / "config.json", json.dumps({**CONFIG, "model_type": model_type, **changed}).encode()
    )


@pytest.mark.parametrize("part", [[1], "x", 1.5, True])
def test_a_part_that_is_no_object_is_named(part: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": part}))
    with pytest.raises(ModelError, match="text_config of the 'gemma3' config is"):
        shape_from_path(tmp_path)


@settings(max_examples=60)
@given(fields=st.dictionaries(st.sampled_from(["format", "step", "world_size", "meta", "files", "tensors"]), values))
def test_any_manifest_is_read_or_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        parse(json.dumps({"format": 1, "torch_version": "2", "sha256": "", **fields}).encode())


def test_what_is_nested_deep_is_refused_and_what_real_files_hold_is_not(tmp_path: Path) -> None:
    depth = MOST_NESTED
    assert parse_json("[" * depth + "]" * depth)
    with pytest.raises(ValueError, match="nested more than"):
        parse_json("[" * (depth + 2) + "]" * (depth + 2))
    assert parse_json(b"\xef\xbb\xbf{}") == parse_json("\ufeff{}") == {}
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigFileError, match="a JSON object was expected, not a list"):
        read_json_table(tmp_path / "list.json")


def test_deep_toml_is_refused_too(tmp_path: Path) -> None:
    for text in (f"a = {'[' * 5000}{']' * 5000}", f"a = {'[' * 300}{']' * 300}"):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(ConfigFileError, match="nested more than"):
            read_toml(tmp_path / "run.toml")
    assert isinstance(apply_settings({}, [f"a.b={'[' * 5000}"])["a"]["b"], str)


def test_a_metrics_line_without_a_step_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": "one"}\n5\n\xff\n{"step": 2}\n')
    assert MetricsFile(tmp_path / "metrics.jsonl", lambda fields: fields["step"]).read() == [2]  # type: ignore[type-var]
