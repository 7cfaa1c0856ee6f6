"""Names are the field's: no private word for what PyTorch and Megatron readers have a name for, no class name twice."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict

from source_files import FILES, SOURCE, parsed

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


_ANY_BANNED = re.compile(rf"\b(?:{'|'.join(BANNED)})\b")


def test_identifiers_are_the_fields_words() -> None:
    found = {str(path.relative_to(SOURCE)): banned_names(path.read_text(encoding="utf-8")) for path in FILES}
    assert not {file: {word: f"write {BANNED[word]}" for word in words} for file, words in found.items() if words}


def test_a_banned_name_is_found_and_a_word_of_prose_is_not() -> None:
    assert banned_names("def f(box: Box) -> None: ...") == {"Box"}
    assert banned_names('x = 1  # Box\ny = "Box"') == set()


def banned_names(text: str) -> set[str]:
    """Banned words among the names of a source text; only a text with such a word is split into tokens."""
    if not _ANY_BANNED.search(text):
        return set()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME} & BANNED.keys()


def test_one_name_is_one_class() -> None:
    homes = defaultdict(set)
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(str(path.relative_to(SOURCE)))
    assert {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1} == {}
