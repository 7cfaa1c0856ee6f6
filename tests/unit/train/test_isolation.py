"""isolate_documents: a document packed behind another is computed as if it stood alone, or the model is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import FAMILIES
from tiny_run import metrics, train_here, write_corpus
from tolerances import SAME_LOGITS_REL, SAME_STEP_REL
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from weft.core.data_spec import DataSpec
from weft.core.errors import ModelError, NotBuiltError
from weft.core.isolation import ISOLATING_FAMILIES
from weft.core.run_spec import ModelSpec
from weft.data import Loader, open_corpus
from weft.data.rows import RowLayout, document_positions
from weft.models.build import build_config, build_skeleton
from weft.train.isolation import require_isolation

END = 256
# Whatever of these a family knows makes it small.
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def real_model(family: str, *, attention: str = "sdpa") -> Any:
    return wide_model(build_config(FAMILIES[family], vocab_size=257, end_of_document=END), attention)


def wide_model(config: Any, attention: str) -> Any:
    """Weights wider than the default ones, so that attention matters."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def require_isolated(model: Any) -> None:
    require_isolation(DataSpec(isolate_documents=True), model)
    draw = np.random.default_rng(0)
    first, second = draw.integers(0, 256, 7), draw.integers(0, 256, 9)
    row = np.concatenate([first, [END], second])[np.newaxis]
    positions = torch.from_numpy(document_positions(row, end_of_document=END))
    with torch.no_grad():
        packed = model(torch.from_numpy(row), position_ids=positions, use_cache=False).logits[0, 8:]
        joined = model(torch.from_numpy(row), use_cache=False).logits[0, 8:]
        alone = model(torch.from_numpy(second)[None], use_cache=False).logits[0]
    scale = alone.abs().max().item()
    assert (packed - alone).abs().max().item() <= SAME_LOGITS_REL * scale
    # Without the positions the numbers are other ones altogether, so that the case can fail.
    assert (joined - alone).abs().max().item() > 1000 * SAME_LOGITS_REL * scale


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_document_does_not_see_the_first(family: str, attention: str) -> None:
    require_isolated(real_model(family, attention=attention))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_run_has_the_loss_of_its_documents_one_by_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus = write_corpus(tmp_path / "texts", longest=12)
    model = real_model(family)
    model.save_pretrained(tmp_path / "model")
    settings = {
        "model": {"path": str(tmp_path / "model"), "config": NO_DROPOUT if family == "gpt2" else {}},
        "data.isolate_documents": True,
        "train.steps": 1,
    }
    train_here(tmp_path / "run", corpus, settings)

    data = open_corpus(DataSpec(source=str(corpus), eval_fraction=0.1)).training
    batch = Loader(data, seed=3, global_batch=8, layout=RowLayout(sequence_length=32, isolate_documents=True)).batch(0)
    pieces = [piece for row in range(8) for piece in documents(batch["input_ids"][row], batch["labels"][row])]
    assert len(pieces) > 8
    with torch.no_grad():
        sums = [F.cross_entropy(model(ids[None]).logits[0], labels, reduction="sum") for ids, labels in pieces]
    found = metrics(tmp_path / "run")[0]
    assert found["tokens"] == sum(int((labels != -100).sum()) for _, labels in pieces)
    assert found["loss"] == pytest.approx(sum(value.item() for value in sums) / found["tokens"], rel=SAME_STEP_REL)


def documents(ids: torch.Tensor, labels: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The row cut after every end of a document."""
    ends = [index + 1 for index, token in enumerate(ids.tolist()) if token == END and index + 1 < len(ids)]
    bounds = [0, *ends, len(ids)]
    return [(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mamba", {"hidden_size": 32}),  # a scan
        ("opt", {"hidden_size": 32, "num_attention_heads": 4, "word_embed_proj_dim": 32}),  # takes no notice
        ("lfm2", {"hidden_size": 32, "num_attention_heads": 4, "layer_types": ["conv", "full_attention"]}),
    ],
)
def test_a_model_that_would_mix_documents_is_refused(family: str, config: dict[str, Any]) -> None:
    layers = {"num_hidden_layers": len(config.get("layer_types", [0]))}
    skeleton = build_skeleton(build_config(ModelSpec(type=family, config={**config, **layers}), vocab_size=257))
    with pytest.raises(NotBuiltError, match=f"'{family}' models are not known"):
        require_isolation(DataSpec(isolate_documents=True), skeleton)
    require_isolation(DataSpec(isolate_documents=False), skeleton)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # used by a family's own code
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(ISOLATING_FAMILIES))
def test_every_listed_family_isolates(family: str, attention: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("a family of a later transformers")
    known = set(CONFIG_MAPPING[family]().to_dict()) | set(CONFIG_MAPPING[family].attribute_map)
    config = {key: value for key, value in SMALL.items() if key in known}
    if "layer_types" in known:
        config["layer_types"] = ["full_attention", "full_attention"]
    require_isolated(wide_model(build_config(ModelSpec(type=family, config=config), vocab_size=257), attention))


def test_a_model_whose_rotary_embedding_follows_the_longest_document_is_refused() -> None:
    """Of a teacher, or a caller's own model: rules judge that of the run alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    scaled = {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    }
    skeleton = build_skeleton(build_config(ModelSpec(type="llama", config={**sizes, **scaled}), vocab_size=257))
    with pytest.raises(ModelError, match="has more than 16 tokens"):
        require_isolation(DataSpec(isolate_documents=True, sequence_length=32), skeleton)
    require_isolation(DataSpec(isolate_documents=True, sequence_length=16), skeleton)
    require_isolation(DataSpec(isolate_documents=False, sequence_length=32), skeleton)
