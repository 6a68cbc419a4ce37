"""`--reward-fn-path` and `--reward-weights`: texts that name reward functions, and the functions themselves.

Knows nothing of processes or of what a function is called with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from fsm_trainer.data.builtin_rewards import PREFIX, make_builtin
from fsm_trainer.data.reward_contracts import FunctionInfo, RewardFunction, function_name
from fsm_trainer.data.rewards import REWARD_FUNCTION, load_reward_fn
from fsm_trainer.data.user_code import UserCodeError, split_spec

Source: TypeAlias = "str | Callable[..., Any]"
"""A text as `split_specs` gives it, or a function itself."""
# A comma separates only where another function begins, so that a pattern may have commas.
_NEXT = re.compile(r",\s*(?=builtin:|[^,?]*\.py\s*(?::\s*[A-Za-z_]\w*\s*)?(?:,|$))")


def split_specs(text: str) -> list[str]:
    """The functions a text names: `FILE.py[:FUNCTION]` or `builtin:NAME[?...]`, separated by commas."""
    with suppress(OSError, RuntimeError):  # a text that no file can be called
        if Path(text).expanduser().is_file():
            return [text]
    return [part.strip() for part in _NEXT.split(text)]


def parse_weights(text: str | None, count: int) -> list[float]:
    """One finite weight a function; all 1 without a text. ValueError says what is wrong."""
    if text is None:
        return [1.0] * count
    parts = [part.strip() for part in text.split(",")]
    try:
        weights = [float(part) for part in parts]
    except ValueError as error:
        raise ValueError(f"--reward-weights is {text}, expected numbers with commas between them") from error
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"--reward-weights is {text}, expected finite numbers")
    if len(weights) != count:
        raise ValueError(
            f"--reward-weights has {len(weights)} number(s) for {count} reward function(s); give one for each"
        )
    return weights


def load_functions(sources: Sequence[Source]) -> list[RewardFunction]:
    """Load every source, under names that differ. ValueError names what cannot be used."""
    functions = [_load(source) for source in sources]
    names = _distinct([function.info.name for function in functions], sources)
    return [
        replace(function, info=function.info._replace(name=name))
        for function, name in zip(functions, names, strict=True)
    ]


def _load(source: Source) -> RewardFunction:
    if not isinstance(source, str):
        return RewardFunction.of(source)
    function = make_builtin(source) if source.startswith(PREFIX) else load_reward_fn(source)
    # The name in the file: the function itself may be called otherwise, as a decorated one.
    name = function_name(function) if source.startswith(PREFIX) else split_spec(source, REWARD_FUNCTION)[1]
    try:
        return RewardFunction.of(function, name)
    except ValueError as error:
        raise UserCodeError(f"{source}: {error}") from error


def _distinct(names: list[str], sources: Sequence[Source]) -> list[str]:
    """Put the file's name before a name that comes twice, and a number after what is still the same."""
    stems = [split_spec(s, "")[0].stem if isinstance(s, str) and not s.startswith(PREFIX) else "" for s in sources]
    full = [
        f"{stem}.{name}" if stem and names.count(name) > 1 else name for stem, name in zip(stems, names, strict=True)
    ]
    counted = [full[: i + 1].count(name) for i, name in enumerate(full)]
    return [name if n == 1 else f"{name}-{n}" for name, n in zip(full, counted, strict=True)]


def describe_function(info: FunctionInfo, source: Source, weight: float) -> str:
    """One line for the plan."""
    where = source if isinstance(source, str) else "given as an object"
    how = "async, " if info.is_async else ""
    return f"{info.name} ({where}): {how}called as {info.contract.value}, weight {weight:g}"
