"""Tasks of the library reasoning-gym as a dataset and as its reward: `reasoning-gym:TASK[,TASK][?NAME=VALUE&...]`.

Everything follows from the text alone, so a reward function in another process makes the same problems anew. Needs the
extra `reasoning-gym`; knows nothing of files or hubs.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

if TYPE_CHECKING:
    from datasets import Dataset

PREFIX = "reasoning-gym:"
DEFAULT_SIZE = 1000
_FORM = "reasoning-gym:TASK[,TASK][?size=1000&seed=0&prompt=text|chat&system=NAME&PARAMETER=VALUE]"
_NO_SYSTEM = "none"


@dataclass(frozen=True)
class TaskSpec:
    """What a `reasoning-gym:` text asks for."""

    tasks: tuple[str, ...]
    size: int
    """Problems of all tasks together, taken in turn."""
    seed: int
    chat: bool
    """Whether prompts are chat messages."""
    system: str
    """Name of one of the library's system prompts, which ask for the answer in tags, or `none`."""
    parameters: tuple[tuple[str, Any], ...]
    """Of a task's own configuration: `NAME` for every task, `TASK.NAME` for one."""

    def parameters_of(self, task: str) -> dict[str, Any]:
        """What one task's configuration gets."""
        plain = {name: value for name, value in self.parameters if "." not in name}
        own = {name.partition(".")[2]: v for name, v in self.parameters if name.startswith(f"{task}.")}
        return {**plain, **own}


def is_reasoning_gym(path: str) -> bool:
    """Whether a dataset path names tasks of reasoning-gym."""
    return path.startswith(PREFIX)


def parse_spec(path: str) -> TaskSpec:
    """Read a `reasoning-gym:` text. ValueError says what is wrong with it; the library is not needed."""
    names, _, query = path.removeprefix(PREFIX).partition("?")
    tasks = tuple(name.strip() for name in names.split(","))
    if not all(tasks):
        raise ValueError(f"dataset {path} names no task, expected {_FORM}")
    try:
        values = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise ValueError(f"dataset {path} has parameters that are no NAME=VALUE, expected {_FORM}") from error
    prompt = values.pop("prompt", "text")
    if prompt not in ("text", "chat"):
        raise ValueError(f"dataset {path}: prompt is {prompt!r}, expected text or chat")
    size = _whole(path, "size", values.pop("size", str(DEFAULT_SIZE)), least=1)
    seed = _whole(path, "seed", values.pop("seed", "0"), least=0)
    system = values.pop("system", _NO_SYSTEM)
    for name in values:
        if "." in name and name.partition(".")[0] not in tasks:
            raise ValueError(f"dataset {path}: {name} is no parameter of {', '.join(tasks)}")
    return TaskSpec(tasks, size, seed, prompt == "chat", system, tuple((k, _value(v)) for k, v in values.items()))


def load_reasoning_gym(path: str) -> Dataset:
    """Rows with prompt, `solutions`, `answer`, `task`, the problem's number in it, and the library's `metadata`."""
    from datasets import Dataset

    spec, tasks = parse_spec(path), _tasks(path)
    system = _system_prompt(path, spec.system)
    rows = []
    for number in range(spec.size):
        index, which = divmod(number, len(spec.tasks))
        problem = tasks[which][index]
        answer = problem["answer"]
        rows.append(
            {
                "prompt": _prompt(problem["question"], system, chat=spec.chat),
                "solutions": [] if answer is None else [str(answer)],
                "answer": None if answer is None else str(answer),
                "task": spec.tasks[which],
                "task_index": index,
                "metadata": json.dumps(problem["metadata"], default=str),
            }
        )
    return Dataset.from_list(rows)


@dataclass(frozen=True)
class ReasoningGymReward:
    """The library's own score of a completion, from 0 to 1. It can be sent to another process."""

    dataset_path: str

    @property
    def __name__(self) -> str:  # noqa: D105 - what messages call it
        return "reasoning_gym.score_answer"

    def __call__(self, record: Any) -> float:
        """Score what is between the last answer tags, or, where no tags are asked for, the whole completion."""
        from reasoning_gym.utils import extract_answer

        spec, row = parse_spec(self.dataset_path), record.source_record
        task = _tasks(self.dataset_path)[spec.tasks.index(row["task"])]
        answer = extract_answer(record.completion)
        if answer is None and spec.system == _NO_SYSTEM:
            answer = record.completion.strip()
        return float(task.score_answer(answer=answer, entry=task[row["task_index"]]))


def default_reward_for(dataset_path: str | None) -> Callable[[Any], float] | None:
    """The reward that comes with a dataset, for a run that names none; None for data without one."""
    if dataset_path is None or not is_reasoning_gym(dataset_path):
        return None
    return ReasoningGymReward(dataset_path)


@lru_cache(maxsize=8)
def _tasks(path: str) -> tuple[Any, ...]:
    """One procedural data set of the library per task."""
    create, known = _library()
    spec = parse_spec(path)
    size = -(-spec.size // len(spec.tasks))
    made = []
    for task in spec.tasks:
        if task not in known:
            raise ValueError(f"dataset {path}: reasoning-gym has no task {task!r}{_like(task, known)}")
        try:
            made.append(create(task, size=size, seed=spec.seed, **spec.parameters_of(task)))
        except (TypeError, ValueError, AssertionError) as error:
            reason = str(error).partition("__init__() ")[2] or str(error) or type(error).__name__
            raise ValueError(f"dataset {path}: task {task} refuses its parameters: {reason}") from error
    return tuple(made)


def _library() -> tuple[Callable[..., Any], Sequence[str]]:
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"a reasoning-gym: dataset needs the extra of that name ({error}): pip install 'fsm-trainer[reasoning-gym]'"
        ) from error
    # `composite` is a mixture of others, which several names after the colon already give.
    return create_dataset, sorted(name for name in DATASETS if name != "composite")


def _system_prompt(path: str, name: str) -> str | None:
    if name == _NO_SYSTEM:
        return None
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if name not in SYSTEM_PROMPTS:
        raise ValueError(f"dataset {path}: system is {name!r}, expected {_NO_SYSTEM}, {', '.join(SYSTEM_PROMPTS)}")
    text: str = SYSTEM_PROMPTS[name]
    return text.strip()


def _prompt(question: str, system: str | None, *, chat: bool) -> str | list[dict[str, str]]:
    if not chat:
        return question if system is None else f"{system}\n\n{question}"
    messages = [{"role": "user", "content": question}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _like(task: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(task, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; it has {', '.join(known)}"


def _whole(path: str, name: str, text: str, *, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"dataset {path}: {name} is {text!r}, expected a whole number of at least {least}")
    return number


def _value(text: str) -> Any:
    """Numbers, true, false and lists as in JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
