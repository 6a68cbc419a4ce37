"""The one error that means "the user asked for something impossible", and its wording helpers.

Knows nothing of pydantic or argparse.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting, file or combination that cannot run: one line saying what is wrong and what to do. Exit code 2."""


def flag(name: str) -> str:
    """The command-line spelling of a setting: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def one_line(text: object) -> str:
    """Fold a message onto one line."""
    return " ".join(str(text).split())


def shown(value: object, limit: int = 80) -> str:
    """A value as a message shows it: text as it is, quoted where it would not be seen, and cut where it is long."""
    text = value if isinstance(value, str) and value.strip() and value.isprintable() else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
