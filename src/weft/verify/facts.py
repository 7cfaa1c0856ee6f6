"""Checks without a bound: rows, initial values, dtypes, replicas. Values are equal or wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from weft.core.records import DtypeRecord
from weft.verify.run_trace import Batch, Tensors
from weft.verify.verdict import Check, Finding

IGNORED = -100
SHOWN = 4  # values of a wrong row that are shown


def check_rows(
    right: Sequence[Batch], found: Sequence[Batch], *, describe_row: Callable[[int], str], is_stream: bool = True
) -> Check:
    """Check that every row of every step is the one given by (seed, step), and that labels are the next tokens.

    The last label of a sample that is not cut from a stream is no input: the oracle judges those."""
    name = "data order"
    for step, (expected, batch) in enumerate(zip(right, found, strict=True), start=1):
        for key, values in expected.items():
            if key not in batch or batch[key].shape != values.shape:
                shape = str(tuple(batch[key].shape)) if key in batch else "none"
                return Check.failed(
                    name, Finding(rule=3, step=step, expected=f"{key} of shape {tuple(values.shape)}", found=shape)
                )
            wrong = (batch[key] != values).any(dim=1).nonzero()
            if wrong.numel():
                row = int(wrong[0])
                column = int((batch[key][row] != values[row]).nonzero()[0])
                return Check.failed(
                    name,
                    Finding(
                        rule=3,
                        step=step,
                        coordinates=f"row {row} on {describe_row(row)}",
                        expected=f"{key}[{column}:] {values[row, column : column + SHOWN].tolist()}",
                        found=str(batch[key][row, column : column + SHOWN].tolist()),
                    ),
                )
        following = expected["labels"][:, :-1]
        if is_stream and not torch.where(following == IGNORED, True, following == expected["input_ids"][:, 1:]).all():
            return Check.failed(
                name, Finding(rule=3, step=step, expected="labels that are the next tokens", found="other tokens")
            )
    return Check.passed(name, f"{len(right)} steps of {right[0]['labels'].shape[0]} rows" if right else "")


def check_initial(right: Tensors, found: Tensors, *, describe_owner: Callable[[str, int], str]) -> Check:
    """Check that initial weights are equal in every bit: they depend on (seed, name) alone."""
    name = "initial weights"
    for key in sorted(set(right) ^ set(found)):
        expected, value = ("a value", "none") if key in right else ("none", "a value")
        return Check.failed(name, Finding(rule=4, parameter=key, expected=expected, found=value))
    for key, values in right.items():
        other = found[key].to(values.device)
        if other.shape == values.shape and torch.equal(other, values):
            continue
        if other.shape != values.shape:
            expected, value = f"shape {tuple(values.shape)}", str(tuple(other.shape))
            return Check.failed(name, Finding(rule=4, parameter=key, expected=expected, found=value))
        index = [int(part) for part in (other != values).nonzero()[0]]
        finding = Finding(
            rule=4,
            parameter=key,
            coordinates=f"element {index}{describe_owner(key, index[0] if index else 0)}",
            expected=f"{values[tuple(index)].item():.6g}",
            found=f"{other[tuple(index)].item():.6g}",
        )
        return Check.failed(name, finding)
    return Check.passed(name, f"{len(right)} tensors, equal bits")


def check_replicas(digests: Mapping[str, Sequence[int]], *, describe_rank: Callable[[int], str]) -> Check:
    """Check that every rank that holds a copy, or can gather one, has the same bits after the last step."""
    name = "replicas"
    for key, by_rank in digests.items():
        differing = next((rank for rank, digest in enumerate(by_rank) if digest != by_rank[0]), None)
        if differing is not None:
            finding = Finding(
                rule=2,
                parameter=key,
                coordinates=describe_rank(differing),
                expected="the bits of rank 0",
                found="other bits",
            )
            return Check.failed(name, finding)
    return Check.passed(name, f"{len(digests)} tensors, equal bits on every rank")


def check_dtypes(records: Sequence[DtypeRecord]) -> Check:
    for record in records:
        if not record.ok:
            finding = Finding(
                rule=6, step=1, parameter=record.component, expected=record.asked, found=", ".join(record.found)
            )
            return Check.failed("dtypes", finding)
    return Check.passed("dtypes", ", ".join(f"{record.component} {record.found[0]}" for record in records))
