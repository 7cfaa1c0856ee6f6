"""`Declared`: read-only values given by keyword, like frozen dataclasses without generated code.

Not for general use: `dataclass` compiles a constructor a class, a millisecond apiece, and `weft plan` starts in a few.
Type checkers see dataclasses; at run time a value is its class's defaults overlaid with what was given.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar, dataclass_transform

D = TypeVar("D", bound="Declared")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Declared:
    _fields: ClassVar[frozenset[str]] = frozenset()
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        # inspect.get_annotations would cost the import that this class exists to save
        own = tuple(vars(cls).get("__annotations__", ()))
        cls._fields = cls._fields | frozenset(own)
        cls._defaults = cls._defaults | {name: cls.__dict__[name] for name in own if name in cls.__dict__}

    def __init__(self, **given: Any) -> None:
        values = self._defaults | given
        if values.keys() != self._fields:
            wrong = sorted(values.keys() ^ self._fields)
            raise TypeError(f"{type(self).__name__}: unknown or missing {', '.join(wrong)}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is read-only: {name} cannot be set")


def replace(value: D, **changes: Any) -> D:
    """The same declaration but for `changes`."""
    return type(value)(**value.__dict__ | changes)
