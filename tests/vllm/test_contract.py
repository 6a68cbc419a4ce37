"""The promises of every rollout engine, kept by this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fsm_trainer.engines.base import SamplingParams, Snapshot
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.testing import engine_contract
from tests.vllm.conftest import Engine, Publish

SAMPLING = SamplingParams(n_samples=3, max_new_tokens=8)
SLOW = replace(SAMPLING, max_new_tokens=200)


@pytest.mark.parametrize("where", ["engine", "on_server"])
def test_every_promise(request: pytest.FixtureRequest, publish: Publish, where: str) -> None:
    """In one test, because the checks need the fixtures; each failure names its promise."""
    engine: Engine = request.getfixturevalue(where)

    def make(sampling: SamplingParams) -> Callable[[], VLLMRolloutEngine]:
        return lambda: engine(eos=() if sampling is SLOW else (2,), **vars(sampling))

    checks = engine_contract(
        make(SAMPLING),
        sampling=SAMPLING,
        publish=publish,
        slow_factory=make(SLOW),
        broken_snapshot=Snapshot(1, "/proc/self/fd/9999", 1),
    )
    failed = []
    for check in checks:
        try:
            check()
        except AssertionError as error:
            failed.append(f"{check.name}: {error}")
    assert not failed
    assert len(checks) > 10
