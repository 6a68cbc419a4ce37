"""Functions in the style of AReno's and TRL's documentation: told apart, called and checked."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from fsm_trainer.data.reward_batch import Completion, PromptRow, RewardBatch, RewardFailure
from fsm_trainer.data.reward_contracts import Contract, RewardFunction
from fsm_trainer.data.reward_executor import ThreadRewards

ROWS = (
    {"prompt": "2+2=", "answer": "4", "task": "math"},
    {"prompt": [{"role": "user", "content": "Say hi"}], "answer": "hi", "task": "talk"},
)


def batch(rows: tuple[dict[str, Any], ...] = ROWS, samples: int = 2) -> RewardBatch:
    prompts = [PromptRow(row, f"<{i}>", (9, i)) for i, row in enumerate(rows)]
    completions = [
        Completion(
            p, f"{row['answer']}{s or ''}", f"{row['answer']}{s or ''}<eos>", (1, s), (-0.5, -0.25), {"sample": s}
        )
        for p, row in enumerate(rows)
        for s in range(samples)
    ]
    return RewardBatch(prompts, completions)


def values(function: Any, given: RewardBatch | None = None, **options: Any) -> list[Any]:
    rewards = ThreadRewards([RewardFunction.of(function)], **options)
    return rewards.score(given or batch(), first_failure_ends=False)[0]


def areno(record):
    return 1.0 if record.completion == record.source_record["answer"] else 0.0


def areno_of_examples(example: dict, completions: list[str]) -> list[float]:
    return [1.0 if completion == example["answer"] else 0.0 for completion in completions]


def trl(prompts, completions, completion_ids, answer, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert [type(c) for c in completions] == [str, str, list, list]
    assert completions[2] == [{"role": "assistant", "content": "hi"}]
    assert prompts[0] == "2+2="
    assert prompts[3] == [{"role": "user", "content": "Say hi"}]
    assert completion_ids == [[1, 0], [1, 1], [1, 0], [1, 1]]
    assert kwargs == {"task": ["math", "math", "talk", "talk"]}
    return [1.0 if text == a else 0.0 for text, a in zip(texts, answer, strict=True)]


async def trl_async(completions, answer, **kwargs):
    await asyncio.sleep(0)
    return trl(completions=completions, answer=answer, **kwargs)


async def areno_async(record):
    await asyncio.sleep(0)
    return areno(record)


class Judge:
    def __call__(self, record: Any) -> float:
        return areno(record)


@pytest.mark.parametrize(
    ("function", "contract", "is_async"),
    [
        (areno, Contract.RECORD, False),
        (areno_async, Contract.RECORD, True),
        (Judge(), Contract.RECORD, False),
        (areno_of_examples, Contract.EXAMPLE, False),
        (trl, Contract.LISTS, False),
        (trl_async, Contract.LISTS, True),
        (lambda record: asyncio.sleep(0, areno(record)), Contract.RECORD, False),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_every_contract_scores_alike(function: Any, contract: Contract, is_async: bool, workers: int) -> None:
    workers = 1 if contract is Contract.LISTS else workers  # the functions assert what a whole batch looks like
    info = RewardFunction.of(function).info
    assert (info.contract, info.is_async) == (contract, is_async)
    assert values(function, workers=workers) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("function", "contract"),
    [
        (lambda record, strict=True: 0.0, Contract.RECORD),
        (lambda *args: 0.0, Contract.RECORD),
        (attrgetter("completion"), Contract.RECORD),
        (lambda completions: [], Contract.LISTS),
        (lambda completions, answer: [], Contract.LISTS),
        (lambda prompts, completions: [], Contract.LISTS),
        (lambda completion_ids, **kw: [], Contract.LISTS),
        (lambda **kwargs: [], Contract.LISTS),
        (lambda row, completions: [], Contract.EXAMPLE),
    ],
)
def test_signatures(function: Any, contract: Contract) -> None:
    assert RewardFunction.of(function).info.contract is contract


def test_a_signature_that_fits_nothing() -> None:
    def score(a, b, c):
        return 0.0

    with pytest.raises(ValueError, match=r"^reward function score\(a, b, c\) has no signature that is known; expected"):
        RewardFunction.of(score)


def test_parallel_workers_are_taken_up_and_checked() -> None:
    def judge(record):
        return 0.0

    judge.parallel_workers = 16
    assert RewardFunction.of(judge).info.parallel_workers == 16
    judge.parallel_workers = "many"
    with pytest.raises(ValueError, match="parallel_workers is 'many', expected a whole number"):
        RewardFunction.of(judge)


def test_a_record_is_the_users_own_to_change() -> None:
    def greedy(record):
        record.source_record["answer"] = record.completion
        record.tokens.clear()
        return areno(record)

    given = batch()
    assert values(greedy, given) == [1.0] * 4
    assert values(areno, given) == [1.0, 0.0, 1.0, 0.0]


def test_none_from_lists_is_no_failure() -> None:
    def only_math(completions, task, **kwargs):
        return [1.0 if t == "math" else None for t in task]

    assert values(only_math) == [1.0, 1.0, None, None]


def test_what_trl_passes_besides_columns() -> None:
    def curriculum(completions, trainer_state, log_metric, completions_ids):
        log_metric("length", 1.0)
        return [trainer_state.global_step + trainer_state.epoch + len(ids) for ids in completions_ids]

    given = batch()
    dated = [c._replace(metadata={"policy_version": 7, "epoch": 2}) for c in given.completions]
    assert values(curriculum, given._replace(completions=dated)) == [11.0] * 4


def failure(function: Any) -> RewardFailure:
    found = values(function)[0]
    assert isinstance(found, RewardFailure)
    return found


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "mine returned 1 rewards for {n} completions, expected one for each"),
        (1.0, "mine returned a float, expected a list of {n} numbers"),
        ("1111", "mine returned a str, expected a list of {n} numbers"),
        (np.zeros(4), "mine returned a ndarray, expected a list of {n} numbers"),
        (None, "mine returned a NoneType, expected a list of {n} numbers"),
        (["a"] * 4, "mine returned 'a' (str), expected one finite number"),
        ([np.zeros(2)] * 4, "mine returned array([0., 0.]) (ndarray), expected one finite number"),
        ([float("nan")] * 4, "mine returned nan, expected a finite number of at most 1e+30 in size"),
    ],
)
def test_wrong_lists_are_told_with_the_functions_name(returned: Any, message: str) -> None:
    def mine(completions, **kwargs):
        return returned[: len(completions)] if isinstance(returned, list | np.ndarray) else returned

    found = failure(mine)
    # Tried again prompt by prompt, so that one prompt's failure is not the whole batch's.
    assert found.message.startswith(message.format(n=2))
    assert (found.kind, found.type) == ("error", "ValueError")


def test_a_column_that_is_not_there() -> None:
    def reward(completions, ground_truth):
        return []

    assert (
        failure(reward).message == "reward wants ground_truth, which is no column of the dataset; it has answer, task"
    )


def test_one_prompts_failure_is_not_the_batchs() -> None:
    def only_talk(completions, task, **kwargs):
        if "math" in task:
            raise LookupError("no solution")
        return [0.5] * len(completions)

    found = values(only_talk)
    assert found[2:] == [0.5, 0.5]
    assert [f.message for f in found[:2]] == ["no solution"] * 2


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RuntimeError("x")])
def test_whatever_is_raised_is_that_samples_failure(error: BaseException) -> None:
    def reward(record):
        if record.completion == "4":
            raise error
        return 1.0

    found = values(reward)
    assert found[0].type == type(error).__name__
    assert found[0].where.startswith("test_reward_contracts.py:")
    assert found[1:] == [1.0] * 3


def test_an_error_that_cannot_be_shown() -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def reward(record):
        raise Mute

    assert failure(reward).type == "Mute"


def test_threads_take_parts_at_the_same_time() -> None:
    import threading

    together = threading.Barrier(2)

    def waits_for_another(record):
        together.wait(30)
        return 1.0

    assert values(waits_for_another, workers=2) == [1.0] * 4
