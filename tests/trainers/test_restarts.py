"""What becomes of a run whose rollout engine dies, hangs or is lost: with the real scheduler and a real process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer import AsyncPolicyTrainer, PolicyOnlyTrainer
from fsm_trainer.config import TrainConfig
from fsm_trainer.core.events import CommandKind, RecordKind
from fsm_trainer.data.prompts import PromptBatch, PromptSource
from fsm_trainer.runtime.host import InlineHost, ProcessHost
from fsm_trainer.trainers import RunResult
from fsm_trainer.trainers import trainer as trainer_module
from tests.clocks import JumpingClock
from tests.trainers.failing_engines import FailingEngine
from tests.trainers.helpers import ROWS, log_of, varied_reward

HUNG_S = 100.0
"""After which a load or generation that hangs is given up. No test waits so long: the run's clock jumps."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, ...]]:
    """Rows of the dataset that each batch was made of."""
    rows: dict[int, tuple[int, ...]] = {}
    original = PromptSource.batch

    def batch(self: PromptSource, batch_id: int) -> PromptBatch | None:
        found = original(self, batch_id)
        if found is not None:
            rows[batch_id] = found.row_indices
        return found

    monkeypatch.setattr(PromptSource, "batch", batch)
    return rows


@pytest.fixture
def fit(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., RunResult]:
    """A run of engines that fail as told."""

    def fit(method: str, how: str, *, times: int = 1, kind: Any = ProcessHost, **changes: Any) -> RunResult:
        factory = partial(FailingEngine, str(tmp_path), method, how, times)
        monkeypatch.setattr(trainer_module, "make_rollout_host", lambda _, engine: kind(factory, f"engine-{engine}"))
        # Its logprobs are made up.
        config = make_config(**{"max_logprob_gap": 0.0, "max_steps": 6, "on_engine_failure": "restart", **changes})
        trainer = AsyncPolicyTrainer if config.is_async else PolicyOnlyTrainer
        made = trainer(config, reward_fn=varied_reward, dataset=ROWS)
        if how != "hangs":
            return made.fit()
        clock, over = JumpingClock(), threading.Event()
        monkeypatch.setattr(trainer_module, "MonotonicClock", lambda: clock)

        def jump_once_it_hangs() -> None:
            while not (tmp_path / "failed-0").exists():
                if over.wait(0.01):
                    return
            assert made._post is not None
            clock.jump(HUNG_S + 1, made._post)

        with ThreadPoolExecutor(1) as pool:
            jumped = pool.submit(jump_once_it_hangs)
            try:
                return made.fit()
            finally:
                over.set()
                jumped.result()

    return fit


FAILURES = [
    ("generate", "dies", {}),
    ("generate", "lost", {}),
    ("generate", "hangs", {"rollout_timeout_s": HUNG_S}),
    ("load_weights", "dies", {}),
    ("load_weights", "raises", {}),
    # Without staleness nothing is exported meanwhile, which has the same limit.
    ("load_weights", "hangs", {"sync_timeout_s": HUNG_S, "async_max_staleness": 0}),
]


@pytest.mark.parametrize(("method", "how", "changes"), FAILURES, ids=[f"{m} {h}" for m, h, _ in FAILURES])
def test_a_new_engine_takes_over(
    fit: Callable[..., RunResult],
    served: dict[int, tuple[int, ...]],
    method: str,
    how: str,
    changes: dict[str, Any],
) -> None:
    result = fit(method, how, **changes)
    assert (result.outcome, result.exit_code, result.train_version) == ("completed", 0, 6), result.message
    rows = log_of(result.run.path)
    starts = [r for r in rows if r.kind is RecordKind.COMMAND and r.trigger == CommandKind.START_ENGINE]
    assert len(starts) == 2
    ends = [r for r in rows if r.kind is RecordKind.TRANSITION and r.machine == "batch" and r.reason == "engine_lost"]
    lost = [r.batch_id for r in ends if r.batch_id is not None]
    if method == "generate":
        assert lost
    for batch in lost:
        later = {row for other, indices in served.items() if other > batch for row in indices}
        assert set(served[batch]) <= later, "its prompts are served again"


def test_an_engine_in_this_process_is_replaced_too(fit: Callable[..., RunResult]) -> None:
    result = fit("generate", "lost", kind=InlineHost)
    assert (result.outcome, result.train_version) == ("completed", 6), result.message
    log_of(result.run.path)


def test_the_synchronous_loop_goes_on_with_a_new_engine(fit: Callable[..., RunResult]) -> None:
    result = fit("generate", "dies", algo="grpo")
    assert (result.outcome, result.train_version) == ("completed", 6), result.message
    log_of(result.run.path)


def test_engines_that_fail_again_and_again_fail_the_run(fit: Callable[..., RunResult]) -> None:
    result = fit("generate", "dies", times=9, max_engine_restarts=2)
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert "engine-0 was restarted 2 times" in result.message
    assert "was killed by SIGKILL" in result.message
    rows = log_of(result.run.path)
    assert len([r for r in rows if r.kind is RecordKind.COMMAND and r.trigger == CommandKind.START_ENGINE]) == 3


@pytest.mark.parametrize(("method", "how"), [("generate", "dies"), ("generate", "lost"), ("load_weights", "raises")])
def test_without_restarts_the_run_fails(fit: Callable[..., RunResult], method: str, how: str) -> None:
    result = fit(method, how, on_engine_failure="fail")
    assert (result.outcome, result.exit_code) == ("failed", 1)
    told = {"dies": "was killed by SIGKILL", "lost": "the server is gone", "raises": "as told"}
    assert told[how] in result.message
    log_of(result.run.path)


def test_what_is_no_failure_of_the_engine_fails_the_run_all_the_same(fit: Callable[..., RunResult]) -> None:
    result = fit("generate", "raises")
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert "as told" in result.message
    log_of(result.run.path)
