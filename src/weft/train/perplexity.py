"""Perplexity of an exported folder on held-out rows of its run: exp(mean loss per token).

One process. The rows are those that training evaluates, from the first on. Loading happens through from_pretrained, so
the figure includes what a format costs where it is used.
"""

from __future__ import annotations

import io
import math
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from weft.core.errors import DataError
from weft.core.run_spec import RunSpec
from weft.data import Loader, open_corpus
from weft.data.rows import IGNORED, RowLayout
from weft.engine.offload.host_room import available_bytes
from weft.models import gguf_export


class HeldOutRows:
    """The first rows of a run's held-out text."""

    def __init__(self, run: RunSpec, num_rows: int) -> None:
        corpus = open_corpus(run.data)
        if corpus.evaluation is None:
            raise DataError("no document of the run is held out", hint="raise data.eval_fraction")
        self._loader = Loader(
            corpus.evaluation,
            seed=run.train.seed,
            global_batch=1,
            layout=RowLayout.of(run.data),
            epochs=1,
            shuffle=False,
        )
        self.num_rows = min(num_rows, self._loader.num_rows)

    def following(self, count: int) -> list[dict[str, torch.Tensor]]:
        """Up to `count` rows that perplexity does not read, to calibrate with."""
        end = min(self.num_rows + count, self._loader.num_rows)
        if end == self.num_rows:
            raise DataError(
                f"all {self.num_rows} held-out rows measure the perplexity, and none is left to calibrate with",
                hint="lower --evaluate-rows, or raise data.eval_fraction in a new run",
            )
        return [self._loader.batch(row) for row in range(self.num_rows, end)]

    @torch.inference_mode()
    def perplexity(self, folder: Path) -> float:
        """The perplexity of the model in `folder`, on a GPU where there is one."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with redirect_stderr(io.StringIO()):  # progress bars of compressed-tensors, which nothing switches off
            model = _loaded(folder).eval().to(device)
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))  # the first forward unpacks weights
        loss, count = 0.0, 0
        for row in range(self.num_rows):
            batch = {name: value.to(device) for name, value in self._loader.batch(row).items()}
            labels = batch.pop("labels").flatten()
            logits = model(**batch, use_cache=False).logits.flatten(0, 1)
            loss += float(cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum"))
            count += int((labels != IGNORED).sum())
        return math.exp(loss / count) if count else math.nan


def _loaded(folder: Path) -> PreTrainedModel:
    if (folder / gguf_export.FILE).is_file():
        return gguf_export.load_gguf(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    return model


def why_not_loaded(folder: Path) -> str:
    """Empty if this process can load the unquantised model in `folder`, and low-bit ones."""
    if find_spec("compressed_tensors") is None:
        return "compressed-tensors is not installed; pip install 'weft-train[lowbit]'"
    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    available = available_bytes()
    if available is None or 1.2 * needed < available:
        return ""
    return f"the model needs {needed / 2**30:.1f} GiB to load, and {available / 2**30:.1f} GiB of host memory are free"
