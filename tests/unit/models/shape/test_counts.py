"""Every causal LM of transformers: totals, blocks and names of its derived shape, to the last parameter."""

import random

import pytest
from meta_models import RefusedError, build, differences, draw
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.models.shape.derive import shape_of_model

_CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# types that transformers itself does not build here, with its reason
_NOT_BUILT = {
    "gemma3n": "timm",
    "gemma4_assistant": "hidden_size_per_layer_input",
    "musicgen": "text parts",
    "musicgen_melody": "text parts",
    "reformer": "is_decoder",
}
_DRAWS = 8


@pytest.mark.parametrize("model_type", _CAUSAL)
def test_random_sizes_are_counted_exactly(model_type: str) -> None:
    """At least one model of the type is built and compared; a type that builds none must be a known one."""
    rng, refusals = random.Random(model_type), []
    for attempt in range(_DRAWS):
        try:
            sizes = draw(model_type, rng, flags=attempt > 0)
            model = build(model_type, sizes)
        except RefusedError as error:
            refusals.append(str(error))
            continue
        shape = shape_of_model(model)
        assert shape.is_exact
        assert differences(model, shape) == [], sizes
        return
    assert model_type in _NOT_BUILT, refusals[0]
    assert _NOT_BUILT[model_type] in refusals[0]


def test_a_wrong_shape_is_noticed() -> None:
    """The judge itself: a shape of other sizes has a wrong total, a wrong block and a wrong matrix."""
    model, other = (build("llama", draw("llama", random.Random(seed))) for seed in (0, 1))
    assert any(line.startswith("total") for line in differences(model, shape_of_model(other)))
