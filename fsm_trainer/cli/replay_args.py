"""What the subcommands of `fsm-replay` share: exit codes, how one is added, its options' types, and what all print."""

from __future__ import annotations

import argparse
import math
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fsm_trainer.eventlog.reader import EventLog

OK, DIVERGED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""All is well; the log diverges or is damaged; bad usage or no run; Ctrl-C."""


class Parser(argparse.ArgumentParser):
    """Complains in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        """Print it and exit."""
        text = " ".join(message.split()).replace("argument ", "", 1)
        print(f"fsm-replay: error: {text}; see {self.prog} --help", file=sys.stderr)
        sys.exit(USAGE)


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
