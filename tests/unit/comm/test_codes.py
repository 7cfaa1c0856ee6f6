"""Codes: the bits of a plain block-by-block rounding, the bound of each format, and the bytes of a message."""

from __future__ import annotations

import pytest
import torch

from weft.comm.code_shares import divide, joined, shares_of, spans_of
from weft.comm.codes import WIRE_DTYPES, decode, encode
from weft.core.wire_bytes import BLOCK, message_bytes, num_blocks, wire_bytes
from weft.verify.plain_codes import rounded

FORMATS = ("bfloat16", "int8", "float8_e4m3")


def draw(count: int, seed: int = 0) -> torch.Tensor:
    """Numbers over nine decades: blocks differ in scale, and inside them too."""
    generator = torch.Generator().manual_seed(seed)
    decades = torch.logspace(-9, 0, count)[torch.randperm(count, generator=generator)]
    return torch.randn(count, generator=generator) * decades


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_a_message_has_the_bits_of_plain_rounding_within_its_bound(name: str, count: int) -> None:
    values = torch.stack([draw(count, seed) for seed in range(3)])
    messages = encode(values, name)
    assert messages.dtype == WIRE_DTYPES[name]
    assert messages.nbytes == 3 * message_bytes(name, [count])
    arrived = decode(messages, (count,), name)
    for given, got in zip(values, arrived, strict=True):
        expected = rounded(given, name)
        assert torch.equal(got, expected.values)
        assert bool(((got - given).abs() <= expected.bound).all())


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_twice_changes_nothing_more(name: str) -> None:
    once = decode(encode(draw(512).unsqueeze(0), name), (512,), name)
    again = decode(encode(once, name), (512,), name)
    assert (again - once).abs().max() <= 2e-7 * once.abs().max()


@pytest.mark.parametrize("name", ["int8", "float8_e4m3"])
def test_zeros_stay_zeros_and_an_overflow_is_seen(name: str) -> None:
    assert torch.equal(decode(encode(torch.zeros(1, 300), name), (300,), name), torch.zeros(1, 300))
    for bad in (float("inf"), float("nan")):
        values = torch.ones(1, 600)
        values[0, 300] = bad
        arrived = decode(encode(values, name), (600,), name)[0]
        assert not arrived[300].isfinite()
        assert bool(arrived[:256].isfinite().all()), "blocks have scales of their own"


def test_the_smallest_numbers_do_not_divide_by_zero() -> None:
    values = torch.full((1, 256), torch.finfo(torch.float32).smallest_normal / 8)
    assert bool(decode(encode(values, "int8"), (256,), "int8").isfinite().all())


def test_codes_are_a_quarter_of_float32() -> None:
    assert wire_bytes("int8") / wire_bytes("float32") == pytest.approx(0.254, abs=5e-4)
    assert message_bytes("int8", [2**20]) / message_bytes("float32", [2**20]) < 0.26


SIZES = (7, 512, 300, 1, 256, 256, 0, 130)


@pytest.mark.parametrize("name", FORMATS)
def test_every_parameter_begins_a_block(name: str) -> None:
    values = torch.stack([draw(sum(SIZES), seed) for seed in range(2)])
    messages = encode(values, name, SIZES)
    assert messages.nbytes == 2 * message_bytes(name, SIZES)
    arrived = decode(messages, SIZES, name)
    for given, got in zip(values, arrived, strict=True):
        assert torch.equal(got, rounded(given, name, SIZES).values)
    for own, got in zip(torch.split(values, SIZES, dim=1), torch.split(arrived, SIZES, dim=1), strict=True):
        alone = decode(encode(own, name), (own.shape[1],), name)
        assert torch.equal(alone, got), "what is sent besides does not change a parameter"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("name", FORMATS)
def test_shares_are_whole_blocks_of_one_message(name: str, num_ranks: int) -> None:
    values = draw(sum(SIZES)).unsqueeze(0)
    message, shares = encode(values, name, SIZES)[0], shares_of(SIZES, num_ranks)
    assert sum(sum(share) for share in shares) == sum(SIZES)
    assert sum(num_blocks(share) for share in shares) == num_blocks(SIZES), "no block has two scales"
    assert max(map(sum, shares)) <= sum(SIZES) / num_ranks + BLOCK
    rows = divide(message, shares, name)
    assert torch.equal(joined(rows, shares, name), message)
    parts = [decode(row.unsqueeze(0), share, name)[0] for row, share in zip(rows, shares, strict=True)]
    assert torch.equal(torch.cat(parts), decode(message.unsqueeze(0), SIZES, name)[0])
    for span, part in zip(spans_of(shares), parts, strict=True):
        assert span.stop - span.start == len(part)


def test_shares_of_fewer_blocks_than_ranks() -> None:
    shares = shares_of((5,), 3)
    assert shares == ((), (), (5,))
    message = encode(torch.ones(1, 5), "int8", (5,))[0]
    assert torch.equal(joined(divide(message, shares, "int8"), shares, "int8"), message)
