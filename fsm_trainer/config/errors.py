"""The one error that means "the user asked for something impossible", and its wording helpers.

Knows nothing of pydantic or argparse.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from fsm_trainer.config.other_words import meaning_here


class ConfigError(ValueError):
    """A setting, file or combination that cannot run: one line saying what is wrong and what to do. Exit code 2."""


def flag(name: str) -> str:
    """The command-line spelling of a setting: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; here it is X` for another system's name, `; did you mean X?` for the closest known name, or nothing."""
    spellings = list(known)
    meaning = meaning_here(name)
    if meaning is not None:
        words = re.sub(r"\{(\w+)\}", lambda found: _spelled(found[1], spellings), meaning)
        return f"; here it is {words}" if meaning.startswith("{") else f"; {words}"
    close = difflib.get_close_matches(name, spellings, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _spelled(setting: str, known: list[str]) -> str:
    """A setting as those that are known are spelt: a flag, or a key in kebab or snake case."""
    return next((s for s in (flag(setting), setting.replace("_", "-"), setting) if s in known), setting)


def one_line(text: object) -> str:
    """Fold a message onto one line."""
    return " ".join(str(text).split())


def shown(value: object, limit: int = 80) -> str:
    """A value as a message shows it: text as it is, quoted where it would not be seen, and cut where it is long."""
    text = value if isinstance(value, str) and value.strip() and value.isprintable() else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
