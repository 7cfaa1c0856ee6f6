"""Names are the field's: no private word for what PyTorch and Megatron readers have a name for, no class name twice."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "weft"
FILES = sorted(SOURCE.rglob("*.py"))

# private word -> the field's
BANNED = {
    "TensorFace": "TPContext",
    "PipelineFace": "PipelineRuntime",
    "Walk": "ScheduleRunner",
    "EndlessWalk": "NoFlushRunner",
    "Mail": "P2PExchange",
    "Book": "ShapeRegistry",
    "Zones": "ActivationLayout",
    "Box": "Chunk",
    "Deferred": "SplitBackward",
    "Course": "RunTrace",
    "Parting": "RoundingAllowance",
    "Promise": "ExpectedCollectives",
    "LateLogits": "LazyLogits",
    "put_around": "wrap_forward",
    "told_of_documents": "skip_packed_sequence_check",
    "mend_products": "patch_low_precision_matmul",
    "install_copy_in": "patch_reduce_scatter_copy",
    "first_half": "backward_input",
    "second_half": "backward_weight",
    "zones": "activation_layout",
    "TensorCut": "ParameterShards",
    "Stand": "BlockPlaceholder",
    "given_by": "placeholder_output",
    "nothing_like": "placeholder_tensor",
    "nothing_for": "placeholder_like",
    "UNCUT": "REPLICATED",
    "UNCUT_ATTENTION": "REPLICATED_ATTENTION",
    "UNCUT_ATTENTION_WHERE": "REPLICATED_ATTENTION_WHERE",
    "UNCUT_EXPERTS": "REPLICATED_EXPERTS",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_identifiers_are_the_fields_words(path: Path) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    found = {token.string for token in tokens if token.type == tokenize.NAME} & BANNED.keys()
    assert not found, {word: f"write {BANNED[word]}" for word in found}


def test_one_name_is_one_class() -> None:
    homes = defaultdict(set)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(str(path.relative_to(SOURCE)))
    assert {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1} == {}
