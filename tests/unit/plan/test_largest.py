"""The largest model of a family: it fits, one block more does not, and more off the device never makes it smaller."""

from dataclasses import replace
from typing import Any

import pytest

from weft.core.errors import ModelError
from weft.plan.largest import WAYS, Largest, family_shapes, largest_models, with_blocks
from weft.plan.request import Request
from weft.plan.search import search
from weft.plan.space import Freedom

HOST = 128 * 10**9


def answers(devices: str = "1xH200", host: int | None = HOST, **asked: Any) -> tuple[Request, list[Largest]]:
    question, found = largest_models("llama", devices, host_memory_bytes=host, sequence_length=2048, **asked)
    return question.request, found


def test_the_answer_fits_and_one_block_more_does_not() -> None:
    request, found = answers()
    assert len(found) == len(WAYS)
    for one, (_, fixed) in zip(found, WAYS, strict=True):
        assert one.best is not None
        assert one.best.fits
        assert one.best.offload.host_bytes_per_node <= 0.9 * HOST
        if one.scaled is None:
            continue
        more = with_blocks(one.scaled, one.scaled.num_layers + 1)
        beyond = search(replace(request, shape=more), freedom=Freedom(fixed=fixed), precision={"preset": "bf16"}, top=1)
        assert not beyond.plans[0].fits


def test_a_host_s_memory_bounds_the_states_that_it_keeps() -> None:
    """8 bytes per parameter in nine tenths of the memory; files lift the bound."""
    _, found = answers()
    sizes = [one.shape.num_parameters if one.shape else 0 for one in found]
    assert sizes[1] == pytest.approx(0.9 * HOST / 8, rel=0.05)
    assert sizes[3] > 2 * sizes[1]
    _, roomy = answers(host=2 * HOST)
    assert (roomy[0].shape, roomy[0].way) == (found[0].shape, "all on the device")
    assert roomy[1].shape is not None
    assert roomy[1].shape.num_parameters > 1.1 * sizes[1]


def test_fixed_keys_hold_for_every_way() -> None:
    _, found = answers(fixed={"activations.policy": "full", "offload.optimizer": "cpu"})
    assert {one.best.plan.offload.optimizer for one in found if one.best} == {"cpu"}


def test_a_device_too_small_for_any_model_has_no_answer() -> None:
    _, found = answers("1xT4", host=10**9)
    assert found[1].named is None
    assert found[1].as_dict()["named"] is None


def test_a_family_is_a_type_of_the_zoo() -> None:
    shapes = family_shapes("llama")
    sizes = [shape.num_parameters for shape in shapes]
    assert sizes == sorted(set(sizes))
    assert {shape.model_type for shape in shapes} == {"llama"}
    with pytest.raises(ModelError, match="no models of type 'llamas'") as caught:
        family_shapes("llamas")
    assert "llama" in caught.value.hint


def test_blocks_repeat_their_order() -> None:
    shape = family_shapes("jamba")[0]
    more = with_blocks(shape, 2 * shape.num_layers + 3)
    assert more.order == (*shape.order, *shape.order, *shape.order[:3])
    assert with_blocks(shape, 5).order == shape.order[:5]
