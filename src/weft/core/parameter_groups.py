"""Parameter groups by pattern of names (`[[train.groups]]`): learning rate and decay that differ from the run's.

The first group whose pattern matches a parameter's name has it; all others have the run's values. Without a group that
says otherwise matrices decay, and vectors (norms, biases) do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pydantic import Field, model_validator

from weft.core.config import Section
from weft.core.errors import BadValueError


class GroupSpec(Section):
    """Parameters whose name matches `pattern`. The first group that matches a name has it."""

    pattern: str = Field(description="a glob pattern of parameter names, such as '*.embed_tokens.*'")
    learning_rate: float | None = Field(
        default=None, ge=0, description="the group's peak learning rate; the schedule scales it as it does the run's"
    )
    learning_rate_ratio: float | None = Field(
        default=None, ge=0, description="the same as a multiple of train.learning_rate; 0 keeps the parameters"
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="the group's decay, of vectors too; absent: train.weight_decay on matrices"
    )

    @model_validator(mode="after")
    def _one_rate(self) -> GroupSpec:
        if self.learning_rate is not None and self.learning_rate_ratio is not None:
            raise ValueError("give one of learning_rate and learning_rate_ratio")
        return self

    def ratio(self, peak: float) -> float:
        """The group's rate as a multiple of the run's, whose peak is `peak`."""
        if self.learning_rate is not None:
            return self.learning_rate / peak
        return 1.0 if self.learning_rate_ratio is None else self.learning_rate_ratio


def group_of(name: str, groups: Sequence[GroupSpec]) -> GroupSpec | None:
    """The first group that matches a parameter's name."""
    return next((group for group in groups if fnmatchcase(name, group.pattern)), None)


def decay_of(name: str, groups: Sequence[GroupSpec], *, num_dims: int, weight_decay: float) -> float:
    group = group_of(name, groups)
    if group is not None and group.weight_decay is not None:
        return group.weight_decay
    return weight_decay if num_dims >= 2 else 0.0


def ratio_of(name: str, groups: Sequence[GroupSpec], *, peak: float) -> float:
    """The learning rate of a parameter as a multiple of the run's."""
    group = group_of(name, groups)
    return 1.0 if group is None else group.ratio(peak)


def require_matches(groups: Sequence[GroupSpec], names: Sequence[str]) -> None:
    """A pattern without a match is an error. `names`: of all parameters of the model."""
    for group in groups:
        if not any(fnmatchcase(name, group.pattern) for name in names):
            raise BadValueError(
                f"train.groups: no parameter matches {group.pattern!r}",
                hint=f"names look like {names[0]!r}; * matches anything",
            )
