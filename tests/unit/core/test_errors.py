"""The error tree: codes are unique, the drawn tree is the real one, errors survive the trip between processes."""

from __future__ import annotations

from weft.core import errors
from weft.core.errors import RankError, UnknownKeyError, error_classes, error_from_dict


def test_codes_are_unique_and_the_drawing_names_every_leaf() -> None:
    classes = list(error_classes())
    assert len({cls.code for cls in classes}) == len(classes)
    drawing = errors.__doc__ or ""
    for cls in classes:
        assert cls.__name__ in drawing
        if not cls.__subclasses__():
            assert f"{cls.code}" in drawing


def test_exit_codes_are_the_promised_ones() -> None:
    assert {cls.exit_code for cls in error_classes()} == {2, 3}


def test_an_error_keeps_its_kind_across_processes() -> None:
    error = error_from_dict(UnknownKeyError("no such key", hint="look").as_dict())
    assert type(error) is UnknownKeyError
    assert (error.message, error.hint, error.exit_code) == ("no such key", "look", 2)
    assert type(error_from_dict({"error": "Nonsense", "message": "x"})) is RankError
