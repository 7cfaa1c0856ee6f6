"""`Action`: the work of one stage on one micro-batch; its printed form, "2I1", parses back.

Times and ranks belong to `Schedule` and `Timeline`; sends and receives follow from the stages.
Printed form: stage, kind, micro-batch, in the letters that torch's pipeline runtime reads.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from weft.core.errors import BadValueError


class Kind(StrEnum):
    """The kind of work. B is I and W together; U appears only in schedules without a flush."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # backward for the inputs, which the previous stage waits for  # noqa: E741
    W = "W"  # backward for the weights, which no other stage waits for
    U = "U"  # update: the optimizer steps with the gradients up to and including this micro-batch

    @property
    def words(self) -> str:
        """The kind spelt out, for legends and traces."""
        return _WORDS[self]


_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward input", Kind.W: "backward weight", Kind.U: "update"}
_PRINTED = re.compile(r"(\d+)([FBIWU])(\d+)")


class Action(NamedTuple):
    """`kind` of work of `stage` (counted over all ranks) on `microbatch` (counted over all steps)."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        match = _PRINTED.fullmatch(text.strip())
        if match is None:
            raise BadValueError(
                f"{text!r} is not a pipeline action", hint="write stage, one of F B I W U, micro-batch: 2I1"
            )
        return Action(Kind(match[2]), int(match[1]), int(match[3]))
