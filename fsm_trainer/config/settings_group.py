"""What every group of settings has in common: frozen, nothing unknown, no text or number that nobody can mean."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MOST = 10**9
"""Largest count, and most seconds, that a setting may have: thirty years of them."""


class SettingsGroup(BaseModel):
    """Rules that hold for every setting."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        validate_default=True,
    )

    @field_validator("*")
    @classmethod
    def _usable_text(cls, value: Any) -> Any:
        """Refuse text that no file or device can be named by; an empty path would mean the current folder."""
        if isinstance(value, str):
            if not value.strip():
                raise PydanticCustomError("empty_text", "a text that is not empty; leave it out for its default")
            if "\0" in value or not _is_unicode(value):
                raise PydanticCustomError("odd_text", "UTF-8 text without null characters")
        return value

    @field_validator("*")
    @classmethod
    def _usable_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a count or a time that torch, the clock or the log cannot reach; nobody means it."""
        bounded = isinstance(value, int) or (isinstance(value, float) and str(info.field_name).endswith("_s"))
        if bounded and value > MOST:
            raise PydanticCustomError("huge_number", "at most {most}", {"most": MOST})
        return value


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: bytes of an argument that are none come as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
