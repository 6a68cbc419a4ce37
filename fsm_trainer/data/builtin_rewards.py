"""Rewards that come with the package, as `builtin:NAME?parameter=value&...`. Each factory makes a function of a record.

Knows nothing of files, weights or processes.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

from fsm_trainer.data.rewards import RewardFn, RewardRecord

PREFIX = "builtin:"
_BOOLEANS = {"true": True, "false": False}


def exact_match(strip: bool = True, ignore_case: bool = False) -> RewardFn:
    """1 if the completion is the row's answer, else 0."""

    def normal(text: object) -> str:
        shown = str(text).strip() if strip else str(text)
        return shown.casefold() if ignore_case else shown

    def reward(record: RewardRecord) -> float:
        return float(normal(record.completion) == normal(_answer(record)))

    return reward


def boxed_math(timeout_s: int = 5) -> RewardFn:
    """1 if math-verify finds the completion's (boxed) answer equal to the row's answer, else 0."""
    parse, verify = _math_verify()

    def reward(record: RewardRecord) -> float:
        # GSM8K writes its reasoning first and the result after four hashes.
        answer = str(_answer(record)).rsplit("####", 1)[-1].strip()
        # Its own limits are signals, which work in the main thread only, as in a reward process.
        limit = timeout_s if threading.current_thread() is threading.main_thread() else None
        gold = parse(answer if "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=limit)
        found = parse(record.completion, parsing_timeout=limit)
        return float(bool(verify(gold, found, timeout_seconds=limit)))

    return reward


def format(pattern: str = r"<think>.*</think>\s*<answer>.*</answer>", match: str = "full") -> RewardFn:
    """1 if the completion, or with match=search a piece of it, matches `pattern`; its `.` matches newlines too."""
    if match not in ("full", "search"):
        raise ValueError(f"match is {match!r}, expected full or search")
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    find = compiled.fullmatch if match == "full" else compiled.search

    def reward(record: RewardRecord) -> float:
        return float(find(record.completion) is not None)

    return reward


def length_penalty(max: int, free: int = 0) -> RewardFn:
    """0 for up to `free` tokens, then falling evenly to -1 at `max` tokens and beyond."""
    if not 0 <= free < max:
        raise ValueError(f"free is {free} and max is {max}, expected 0 <= free < max")

    def reward(record: RewardRecord) -> float:
        over = sum(record.loss_mask) - free
        return 0.0 if over <= 0 else -(over / (max - free)) if over < max - free else -1.0

    return reward


BUILTINS: dict[str, Callable[..., RewardFn]] = {
    function.__name__: function for function in (exact_match, boxed_math, format, length_penalty)
}


def make_builtin(spec: str) -> RewardFn:
    """The function of `builtin:NAME?parameter=value&...`; ValueError says what is wrong with it."""
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    factory = BUILTINS.get(name)
    if factory is None:
        raise ValueError(f"{spec} is no built-in reward{_close(name, BUILTINS)}; there are {', '.join(BUILTINS)}")
    try:
        reward = factory(**_parameters(query, factory))
    except ValueError as error:
        raise ValueError(f"{spec}: {error}") from error
    reward.__name__ = name
    return reward


def _parameters(query: str, factory: Callable[..., RewardFn]) -> dict[str, Any]:
    known = inspect.signature(factory).parameters
    values: dict[str, Any] = {}
    # An ampersand inside a value stays there unless a parameter's name follows it.
    for part in re.split(f"&(?=(?:{'|'.join(known)})=)", query) if query else []:
        name, equals, text = part.partition("=")
        if not equals or name not in known:
            raise ValueError(f"{part} is no parameter{_close(name, known)}; it takes {', '.join(known)}")
        values[name] = _typed(name, text, str(known[name].annotation))
    missing = [name for name, p in known.items() if p.default is p.empty and name not in values]
    if missing:
        raise ValueError(f"{missing[0]} is missing; give {missing[0]}=VALUE after the question mark")
    return values


def _typed(name: str, text: str, kind: str) -> object:
    if kind == "bool" and text in _BOOLEANS:
        return _BOOLEANS[text]
    if kind == "int" and re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if kind == "str":
        return text
    raise ValueError(f"{name} is {text!r}, expected {'true or false' if kind == 'bool' else 'a whole number'}")


def _close(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _answer(record: RewardRecord) -> Any:
    if record.answer is None:
        raise ValueError("the row has none of solutions, answer and solution, so there is nothing to compare with")
    return record.answer


def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError("it needs the extra `math`: pip install 'fsm-trainer[math]'") from error
    # Without its signal limits, in a thread, it would warn at every call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify
