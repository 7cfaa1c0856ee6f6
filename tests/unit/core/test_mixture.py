"""The rule for which blocks a budget computes again: as many as asked, spread over any stretch, the last one last."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weft.core.mixture import block_policies, counts_before


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[int, int, int]:
    num_blocks = draw(st.integers(1, 130))
    full = draw(st.integers(0, num_blocks))
    return num_blocks, full, draw(st.integers(0, num_blocks - full))


@given(mixtures())
def test_as_many_blocks_as_asked(given_: tuple[int, int, int]) -> None:
    num_blocks, full, selective = given_
    found = Counter(block_policies("budget", (full, selective), num_blocks=num_blocks))
    assert found == Counter(full=full, selective=selective, none=num_blocks - full - selective)


@given(mixtures(), st.data())
def test_every_stretch_has_its_share(given_: tuple[int, int, int], data: st.DataObject) -> None:
    num_blocks, full, selective = given_
    begin = data.draw(st.integers(0, num_blocks - 1))
    end = data.draw(st.integers(begin + 1, num_blocks))
    found = Counter(block_policies("budget", (full, selective), num_blocks=num_blocks)[begin:end])
    share = (end - begin) / num_blocks
    assert abs(found["none"] - share * (num_blocks - full - selective)) < 1
    assert abs(found["full"] - share * full) < 2
    assert abs(found["selective"] - share * selective) < 2


@given(mixtures())
def test_the_last_block_is_computed_again_only_where_all_are(given_: tuple[int, int, int]) -> None:
    num_blocks, full, selective = given_
    found = block_policies("budget", (full, selective), num_blocks=num_blocks)
    assert (found[-1] == "none") == (full + selective < num_blocks)
    if full + selective:
        assert found[0] == ("full" if full else "selective")


@given(mixtures(), st.data())
def test_counts_are_those_of_the_blocks(given_: tuple[int, int, int], data: st.DataObject) -> None:
    num_blocks, full, selective = given_
    before = data.draw(st.integers(0, num_blocks))
    found = Counter(block_policies("budget", (full, selective), num_blocks=num_blocks)[:before])
    counted = counts_before(before, num_blocks=num_blocks, full=full, selective=selective)
    assert counted == (found["full"], found["selective"])


def test_by_hand() -> None:
    assert block_policies("budget", (2, 0), num_blocks=6) == ("full", "none", "none", "full", "none", "none")
    assert block_policies("budget", (1, 2), num_blocks=4) == ("full", "selective", "selective", "none")
    assert block_policies("selective", None, num_blocks=2) == ("selective", "selective")
