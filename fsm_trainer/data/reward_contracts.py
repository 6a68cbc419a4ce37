"""The forms a reward function may have, told apart by its signature, and how a function of each form is called.

AReno's functions score one record, its older ones the completions of one example; TRL's score lists. Each may be
asynchronous. Knows nothing of files, processes or what becomes of a failure.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from fsm_trainer.data.reward_batch import RewardBatch, RewardFailure, Value
from fsm_trainer.data.rewards import checked_number
from fsm_trainer.runtime.failures import describe

_TRL_NAMES = frozenset({"prompts", "completions", "completion_ids", "completions_ids"})
_TRL_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass on."""
Call = tuple[int, int, Callable[[], list[Any]]]
"""First and last completion (exclusive) of one call of the user's function, and the call."""


class Contract(str, Enum):
    """What a reward function takes and gives."""

    RECORD = "reward_fn(record) -> float"
    EXAMPLE = "reward_fn(example, completions) -> list[float]"
    LISTS = "reward_fn(prompts=, completions=, completion_ids=, **columns) -> list[float | None]"


class FunctionInfo(NamedTuple):
    """What the run needs to know of a reward function that may live in another process."""

    name: str
    contract: Contract
    is_async: bool
    parallel_workers: int | None
    """Calls at a time that the function asks for."""

    @property
    def scores_parts_whole(self) -> bool:
        """Whether one call scores all completions it is given."""
        return self.contract is Contract.LISTS or (self.contract is Contract.RECORD and self.is_async)

    def parts(self, batch: RewardBatch, workers: int, most: int) -> list[tuple[int, int]]:
        """Cut a batch into parts for `workers`, none longer than `most` completions; lists keep prompts whole."""
        count = len(batch.completions)
        wanted = 1 if workers == 1 else workers if self.contract is Contract.LISTS else 4 * workers
        size = min(most, max(-(-count // wanted), 1))
        if self.contract is Contract.RECORD:
            return [(start, min(start + size, count)) for start in range(0, count, size)]
        return _joined(batch.groups(), size)

    def units(self, batch: RewardBatch, start: int, stop: int) -> list[tuple[int, int]]:
        """The least that can be scored by itself, within a part."""
        if self.contract is Contract.RECORD:
            return [(i, i + 1) for i in range(start, stop)]
        return [(start + a, start + b) for a, b in batch.part(start, stop).groups()]


def _joined(groups: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    parts: list[tuple[int, int]] = []
    for start, stop in groups:
        if parts and stop - parts[-1][0] <= size:
            parts[-1] = (parts[-1][0], stop)
        else:
            parts.append((start, stop))
    return parts


@dataclass(frozen=True)
class RewardFunction:
    """A user's function and how to call it."""

    function: Callable[..., Any]
    info: FunctionInfo

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> RewardFunction:
        """Look at a function; ValueError if its signature is none that is known."""
        name = name or function_name(function)
        asked = getattr(function, "parallel_workers", None)
        if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
            raise ValueError(f"{name}.parallel_workers is {asked!r}, expected a whole number of at least 1")
        return cls(function, FunctionInfo(name, contract_of(function, name), _is_async(function), asked))

    def calls(self, batch: RewardBatch, limit_s: float | None = None) -> Iterator[Call]:
        """The calls that score a batch, each giving one value a completion; a value may be a `RewardFailure`."""
        info = self.info
        if info.contract is Contract.RECORD and info.is_async:
            yield 0, len(batch.completions), partial(self._records_at_once, batch, limit_s)
        elif info.contract is Contract.RECORD:
            for index in range(len(batch.completions)):
                yield index, index + 1, partial(self._record, batch, index)
        elif info.contract is Contract.EXAMPLE:
            for start, stop in batch.groups():
                yield start, stop, partial(self._example, batch.part(start, stop))
        else:
            yield 0, len(batch.completions), partial(self._lists, batch)

    def _record(self, batch: RewardBatch, index: int) -> list[float]:
        return [self._number(_settled(self.function(batch.record(index))))]

    def _records_at_once(self, batch: RewardBatch, limit_s: float | None) -> list[Value]:
        async def one(index: int) -> float:
            return self._number(await self.function(batch.record(index)))

        async def every() -> list[Value]:
            tasks = [asyncio.ensure_future(one(i)) for i in range(len(batch.completions))]
            await asyncio.wait(tasks, timeout=limit_s)
            return [self._outcome(task, limit_s) for task in tasks]

        return asyncio.run(every())

    def _outcome(self, task: asyncio.Future[float], limit_s: float | None) -> Value:
        if not task.done():
            task.cancel()
            return RewardFailure("timeout", "RewardTimeout", f"{self.info.name}: a call took longer than {limit_s:g} s")
        error = task.exception()
        return failure_of(error) if error is not None else task.result()

    def _example(self, group: RewardBatch) -> list[Any]:
        texts = [completion.text for completion in group.completions]
        return self._list(_settled(self.function(dict(group.prompts[0].row), texts)), len(texts))

    def _lists(self, batch: RewardBatch) -> list[Any]:
        given = list_arguments(self.function, batch, self.info.name)
        return self._list(_settled(self.function(**given)), len(batch.completions))

    def _list(self, values: Any, count: int) -> list[Any]:
        name = self.info.name
        if not isinstance(values, list | tuple):
            raise ValueError(f"{name} returned a {type(values).__name__}, expected a list of {count} numbers")
        if len(values) != count:
            raise ValueError(f"{name} returned {len(values)} rewards for {count} completions, expected one for each")
        none_allowed = self.info.contract is Contract.LISTS
        return [None if value is None and none_allowed else self._number(value) for value in values]

    def _number(self, value: Any) -> float:
        return checked_number(self.info.name, value)


def function_name(function: Callable[..., Any]) -> str:
    """How a function is called in messages, metrics and samples."""
    inner = function.func if isinstance(function, partial) else function
    return getattr(inner, "__name__", type(inner).__name__)


def contract_of(function: Callable[..., Any], name: str) -> Contract:
    """Tell the contract by the names of the parameters; ValueError if none fits."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Contract.RECORD  # written in C, as operator.attrgetter: it takes one object
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    others = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in named]
    required = [p.name for p in named if p.default is p.empty]
    if len(required) == 2 and names[1] == "completions" and names[0] not in _TRL_NAMES and not others:
        return Contract.EXAMPLE
    if _TRL_NAMES & set(names) or (others and not named):
        return Contract.LISTS
    positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    if (required == positional[:1] and positional) or (not required and (positional or not named)):
        return Contract.RECORD
    raise ValueError(
        f"reward function {name}({', '.join(names)}) has no signature that is known; expected {name}(record), "
        f"{name}(example, completions), or {name}(completions, **kwargs) with columns by name"
    )


def list_arguments(function: Callable[..., Any], batch: RewardBatch, name: str) -> dict[str, Any]:
    """What TRL gives a reward function, as far as this one takes it. ValueError for a column that is not there."""
    prompts = [batch.prompts[completion.prompt] for completion in batch.completions]
    columns = dict.fromkeys(key for prompt in batch.prompts for key in prompt.row if key not in _TRL_COLUMNS)
    given: dict[str, Any] = {
        "prompts": [prompt.row.get("prompt", prompt.text) for prompt in prompts],
        "completions": [
            [{"role": "assistant", "content": completion.text}] if _is_chat(prompt.row) else completion.text
            for prompt, completion in zip(prompts, batch.completions, strict=True)
        ],
        "completion_ids": [list(completion.tokens) for completion in batch.completions],
        **{key: [prompt.row.get(key) for prompt in prompts] for key in columns},
    }
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.name not in given and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            extra = _extra(parameter.name, given, batch)
            if extra is not None:
                given[parameter.name] = extra
            elif parameter.default is parameter.empty:
                raise ValueError(
                    f"{name} wants {parameter.name}, which is no column of the dataset; it has {', '.join(columns)}"
                )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    accepted = {parameter.name for parameter in parameters}
    return {key: value for key, value in given.items() if key in accepted}


def _extra(name: str, given: Mapping[str, Any], batch: RewardBatch) -> Any:
    """What TRL passes besides lists, for functions that name it; None if it passes no such thing."""
    if name == "completions_ids":
        return given["completion_ids"]
    if name == "trainer_state":
        metadata = batch.completions[0].metadata
        return SimpleNamespace(global_step=metadata.get("policy_version", 0), epoch=metadata.get("epoch", 0))
    return (lambda *_, **__: None) if name in ("log_extra", "log_metric") else None


def _is_chat(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("prompt"), list)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _settled(value: Any) -> Any:
    """The value itself, or what it comes to if it must be awaited."""
    if not inspect.isawaitable(value):
        return value

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return asyncio.run(wait(value))


def failure_of(error: BaseException) -> RewardFailure:
    """An exception of the user's code as text, whatever its own methods do."""
    try:
        failure = describe(error)
    except Exception:  # a user's __str__ may raise anything
        return RewardFailure("error", type(error).__name__, "(its message cannot be shown)")
    return RewardFailure("error", failure.type, failure.message, failure.traceback, failure.where)
