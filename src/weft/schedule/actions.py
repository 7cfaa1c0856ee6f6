"""`Action`: one piece of work of one stage on one micro-batch; a value whose printed form, "2I1", parses back.

It says nothing of when or on which rank (that is `Schedule`), nor of sends and receives: those follow from the stages.
Printed form: stage, kind, micro-batch, the same letters that torch's pipeline runtime reads.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from weft.core.errors import BadValueError


class Kind(StrEnum):
    """What is done. B is I and W in one piece; U appears in schedules without a flush only."""

    F = "F"  # forward
    B = "B"  # whole backward
    I = "I"  # backward for the inputs: what the stage before waits for  # noqa: E741
    W = "W"  # backward for the weights: nobody waits for it
    U = "U"  # update: the optimizer steps with the gradients up to and including this micro-batch


_PRINTED = re.compile(r"(\d+)([FBIWU])(\d+)")


class Action(NamedTuple):
    """`kind` of work of `stage` (counted over all ranks) on `microbatch` (counted over the whole window)."""

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
                f"{text!r} is no pipeline action", hint="write stage, one of F B I W U, micro-batch: 2I1"
            )
        return Action(Kind(match[2]), int(match[1]), int(match[3]))
