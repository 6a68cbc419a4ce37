"""What the subcommands of `fsm-replay` share: exit codes, how one is added, its options' types, and what all print."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsm_trainer.eventlog.reader import EventLog

OK, DIVERGED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""All is well; the log diverges or is damaged; bad usage or no run; Ctrl-C."""


def add_command(commands: Any, name: str, handler: Any, text: str) -> argparse.ArgumentParser:
    """Add a subcommand that looks at one run; `handler(args)` prints and returns the exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=sentence(text))
    parser.add_argument("run", metavar="RUN", help="a run directory, or its events.arrows")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=handler)
    return parser


def sentence(text: str) -> str:
    """The text as one, its names as they are written."""
    return f"{text[0].upper()}{text[1:]}."


def count(text: str) -> int:
    """An option's value of at least 1."""
    if (value := whole_number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} given, expected at least 1")
    return value


def whole_number(text: str) -> int:
    """A number that a column of the log can hold."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} given, expected a whole number of at most 18 digits")
    return int(text)


def tell_problem(log: EventLog) -> None:
    """Say on standard error where reading the log stopped, if it did."""
    if log.problem is not None:
        print(f"fsm-replay: note: {log.problem}; {log.dropped_bytes} bytes dropped", file=sys.stderr)


def number(value: float | None) -> str:
    """Four digits; a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


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
