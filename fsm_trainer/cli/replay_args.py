"""What the subcommands of `fsm-replay` share: exit codes, how one is added, and the types of their options."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OK, DIVERGED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""All is well; the log diverges or is damaged; bad usage or no run; Ctrl-C."""


def add_command(commands: Any, name: str, handler: Any, text: str) -> argparse.ArgumentParser:
    """Add a subcommand that looks at one run; `handler(args)` prints and returns the exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.add_argument("run", metavar="RUN", help="a run directory, or its events.arrows")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=handler)
    return parser


def count(text: str) -> int:
    """An option's value of at least 1."""
    if (number := whole_number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} given, expected at least 1")
    return number


def whole_number(text: str) -> int:
    """A number that a column of the log can hold."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} given, expected a whole number of at most 18 digits")
    return int(text)


def one_of(option: str, value: str, allowed: list[str]) -> None:
    """Raise ValueError unless the value is allowed."""
    if value not in allowed:
        raise ValueError(f"{option} is {value!r}, expected one of {', '.join(allowed)}")


def output_file(given: str | None, default: Path) -> Path:
    """The file to write to, `default` if none is given; ValueError if it cannot be written."""
    path = default if given is None else Path(given)
    with writing(path):
        if path.is_dir():
            raise ValueError(f"{str(path)[:200]} is a folder; give a file to write to with -o FILE")
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the system's refusal to write into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or str(error)
        raise ValueError(f"{str(path)[:200]} cannot be written: {problem}; give another file with -o FILE") from error
