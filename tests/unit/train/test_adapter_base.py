"""A checkpoint of an adapter holds no base weights: other files under it are refused, in a resume and in a merge."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES

import weft
from weft.core.errors import RunChangedError
from weft.core.run_spec import RunSpec
from weft.models.build import build_config
from weft.models.weight_files import digest_of
from weft.train.export import export_run


def _save_base(folder: Path, *, seed: int) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = build_config(FAMILIES["llama"], vocab_size=257)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _run(base: Path, **adapter: Any) -> RunSpec:
    return RunSpec.from_tables(
        {
            "model": {"path": str(base)},
            "data": {"tokenizer": "bytes", "sequence_length": 16},
            "adapter": {"kind": "lora", "rank": 2, "alpha": 4, **adapter},
            "train": {"steps": 2, "global_batch": 2},
            "evaluation": {"every": 0},
            "logging": {"tensorboard": False},
        }
    )


def test_other_weights_under_an_adapter_are_refused(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "run"
    _save_base(base, seed=0)
    weft.train(_run(base), out=out, quiet=True, callbacks=[lambda record: record.step == 1])
    good = digest_of(base)
    shutil.copytree(base, tmp_path / "kept")
    _save_base(base, seed=1)
    assert digest_of(base) != good
    with pytest.raises(RunChangedError, match="are not those under which the adapter"):
        export_run(out, tmp_path / "merged", step=None)
    with pytest.raises(RunChangedError, match="are not those under which the adapter"):
        weft.train(resume=out, quiet=True)
    shutil.rmtree(base)
    shutil.copytree(tmp_path / "kept", base)  # other times of change, the same bytes
    assert digest_of(base) == good
    export_run(out, tmp_path / "merged", step=None)
    assert weft.train(resume=out, quiet=True)["run"]["status"] == "finished"


def test_an_edited_adapter_is_a_change_of_the_run(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "run"
    _save_base(base, seed=0)
    weft.train(_run(base), out=out, quiet=True, callbacks=[lambda record: record.step == 1])
    with pytest.raises(RunChangedError, match=r"adapter.alpha: 4(\.0)? -> 8"):
        weft.train(_run(base, alpha=8), resume=out, quiet=True)


def test_one_changed_byte_in_a_sample_changes_the_digest(tmp_path: Path) -> None:
    _save_base(tmp_path, seed=0)
    good, file = digest_of(tmp_path), tmp_path / "model.safetensors"
    with file.open("r+b") as data:
        data.seek(-1, 2)
        last = data.read(1)
        data.seek(-1, 2)
        data.write(bytes([last[0] ^ 1]))
    assert digest_of(tmp_path) != good
