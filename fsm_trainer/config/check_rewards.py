"""The reward functions of a run: found, looked at and told before it starts; one line for whatever cannot be used.

Functions that will run in processes are looked at in one, so that this process never runs the user's file.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsm_trainer.config.errors import ConfigError
from fsm_trainer.config.train_config import TrainConfig
from fsm_trainer.data.reasoning_gym import default_reward_for
from fsm_trainer.data.reward_contracts import FunctionInfo, function_name
from fsm_trainer.data.reward_executor import RewardExecutor, ThreadRewards, worker_count
from fsm_trainer.data.reward_pool import ProcessRewards, inspect_sources
from fsm_trainer.data.reward_specs import Source, describe_function, parse_weights, split_specs
from fsm_trainer.data.rewards import RewardFn

_SHARE_OF_BATCH = 0.9
"""Share of a batch's limit that one call may take: what is left is for the others, and to tell."""
GivenRewards = RewardFn | Sequence[RewardFn]
"""Functions given as objects instead of a path."""


@dataclass(frozen=True)
class Rewards:
    """Reward functions that have been loaded once."""

    given: tuple[RewardFn, ...]
    """Functions that were given as objects."""
    infos: tuple[FunctionInfo, ...]
    weights: tuple[float, ...]
    workers: int
    in_processes: bool
    in_threads: ThreadRewards | None
    """The loaded functions, if they run in this process."""

    def make_executor(self, config: TrainConfig) -> RewardExecutor:
        """What scores in the run of `config`, whose files may lie elsewhere than when they were checked."""
        if self.in_threads is not None:
            return self.in_threads
        sources = reward_sources(config, self.given)
        return ProcessRewards(sources, self.infos, workers=self.workers, call_limit_s=call_limit_s(config))

    def describe(self, config: TrainConfig) -> list[str]:
        """Lines for the plan: each function with its contract, then where they run."""
        sources = reward_sources(config, self.given)
        lines = [describe_function(*each) for each in zip(self.infos, sources, self.weights, strict=True)]
        limit = call_limit_s(config) if self.in_processes else None
        kind = "process" if self.in_processes else "thread"
        where = f"{self.workers} {kind}{'es' if self.in_processes and self.workers > 1 else ''}"
        where += "s" if not self.in_processes and self.workers > 1 else ""
        limited = f"at most {limit:g} s a call" if limit is not None else "no limit for a call"
        return [*lines, f"in {where}, {limited}; on an error: {config.reward_on_error}"]


def reward_sources(config: TrainConfig, given: Sequence[RewardFn] = ()) -> list[Source]:
    """Where a configuration's reward functions come from."""
    if given:
        return list(given)
    if config.reward_fn_path is None and (own := default_reward_for(config.dataset_path)) is not None:
        return [own]
    return list(split_specs(str(config.reward_fn_path)))


def call_limit_s(config: TrainConfig) -> float | None:
    """The limit of one call; None for no limit."""
    if config.reward_call_timeout_s is not None:
        return config.reward_call_timeout_s or None
    return _SHARE_OF_BATCH * config.reward_timeout_s or None


def open_rewards(config: TrainConfig, given: GivenRewards | None = None) -> Rewards:
    """Load the reward functions once, to see what they are. ValueError names what cannot be used."""
    functions = () if given is None else (given,) if callable(given) else tuple(given)
    if given is not None and not functions:
        raise ConfigError("reward_fn is an empty list; give at least one function")
    sources = reward_sources(config, functions)
    weights = tuple(parse_weights(config.reward_weights, len(sources)))
    if _in_processes(config, functions):
        infos = tuple(inspect_sources(sources))
        workers = worker_count(infos, config.reward_workers, os.cpu_count() or 1)
        return Rewards(functions, infos, weights, workers, True, None)
    if config.reward_call_timeout_s:
        raise ConfigError(
            f"--reward-call-timeout-s is {config.reward_call_timeout_s:g}, but a call in a thread cannot be ended; "
            f"give --reward-executor process"
        )
    threads = ThreadRewards.load(sources, workers=config.reward_workers)
    return Rewards(functions, tuple(threads.infos), weights, threads.workers, False, threads)


def _in_processes(config: TrainConfig, given: Sequence[RewardFn]) -> bool:
    """A function given as an object stays here, with what it refers to, unless a process is asked for."""
    if config.reward_executor == "thread":
        return False
    if not given:
        return True
    if "reward_executor" not in config.model_fields_set:
        return False
    for function in given:
        _check_importable(function)
    return True


def _check_importable(function: Callable[..., Any]) -> None:
    try:
        text = pickle.dumps(function)
    except Exception as error:  # whatever the object's own pickling raises
        raise ConfigError(_not_importable(function)) from error
    if b"__main__" in text:
        raise ConfigError(_not_importable(function))


def _not_importable(function: Callable[..., Any]) -> str:
    return (
        f"reward_executor is process, but {function_name(function)} cannot be imported in another process: define it "
        f"at the top of an importable module, or give reward_executor thread"
    )
