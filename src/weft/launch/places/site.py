"""Sections of launch.toml: frozen tables of names and limits of a site; numbers may be given where text is meant."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict

from weft.core.config import Section

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_QUALIFIED = rf"(?:{_SUBDOMAIN}/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"


class SiteSection(Section):
    model_config = ConfigDict(coerce_numbers_to_str=True)  # `time = 30`, `memory = 0`


def matches(pattern: str, what: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"is not {what}")
        return text

    return AfterValidator(check)


Line = Annotated[str, matches(r"[^\n\r\0]*", "one line")]
Quantity = Annotated[str, matches(r"\d+(?:\.\d+)?(?:m|k|Ki|M|Mi|G|Gi|T|Ti)?", "a quantity such as 8, 500m, 64Gi")]
Label = Annotated[str, matches(_LABEL, "a name of lower-case letters, digits and '-'")]
Name = Annotated[str, matches(_SUBDOMAIN, "a name of lower-case letters, digits, '-' and '.'")]
OptionalName = Annotated[str, matches(rf"|{_SUBDOMAIN}", "a name of lower-case letters, digits, '-' and '.'")]
Key = Annotated[str, matches(_QUALIFIED, "the name of a label or resource, such as rdma/hca")]
OptionalKey = Annotated[str, matches(rf"|{_QUALIFIED}", "the name of a label")]
Variable = Annotated[str, matches(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")]
AbsolutePath = Annotated[str, matches(r"/[^\n\r\0:]*", "an absolute path")]
