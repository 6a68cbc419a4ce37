"""The mismatch gate in real runs: every fault that is put in stops the run before a step is taken from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsm_trainer import AsyncPolicyTrainer, PolicyOnlyTrainer
from fsm_trainer.config import TrainConfig
from fsm_trainer.core.events import CommandKind, InputKind, Record, RecordKind
from fsm_trainer.engines.base import Loaded, Rollout, RolloutRequest, Sample, Scores, Snapshot
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.engines.logprob_gap import GapLimit, LogprobGap, LogprobMismatch
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.runtime.host import InlineHost
from fsm_trainer.trainers import RunResult
from fsm_trainer.trainers import trainer as trainer_module
from fsm_trainer.trainers.engines import sampling_params
from fsm_trainer.trainers.mismatch import MismatchGate
from tests.trainers.helpers import ROWS, log_of, metrics_of, sequence, train_batch, varied_reward

Make = Callable[..., TrainConfig]
Faulty = type[HFRolloutEngine]
STALE_FROM = 2
"""Version from which on the faults below are there."""


class Forgetful(HFRolloutEngine):
    """Says that it has loaded, but an older version stays in place."""

    def load_weights(self, snapshot: Snapshot) -> Loaded:
        if snapshot.version < STALE_FROM:
            return super().load_weights(snapshot)
        self._version = snapshot.version
        return Loaded(snapshot.version)


class OldCache(HFRolloutEngine):
    """Generates from what it computed with older weights, as a prefix cache does that outlives a load."""

    old: Any = None

    def load_weights(self, snapshot: Snapshot) -> Loaded:
        if snapshot.version >= STALE_FROM and self.old is None:
            self.old = copy.deepcopy(self._model)
        return super().load_weights(snapshot)

    def generate(self, request: RolloutRequest) -> Rollout:
        current = self._model
        self._model = self.old or current
        try:
            return super().generate(request)
        finally:
            self._model = current


class OtherTemplate(HFRolloutEngine):
    """Puts a token of its own before every prompt."""

    def generate(self, request: RolloutRequest) -> Rollout:
        return super().generate(replace(request, prompts=tuple((3, *prompt) for prompt in request.prompts)))


class OtherTemperature(HFRolloutEngine):
    """Samples hotter than it was told, and records the logprobs of that."""

    def generate(self, request: RolloutRequest) -> Rollout:
        self._sampling = replace(self._sampling, temperature=2.0)
        return super().generate(request)


class CannotScore(HFRolloutEngine):
    """Has no way to score given tokens."""

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores:
        return None  # type: ignore[return-value]  # as the protocol allows


class OtherTemplateUnseen(OtherTemplate, CannotScore):
    """Both: only a step can notice."""


class OldCacheUnseen(OldCache, CannotScore):
    """The same from version 2 on."""


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Faulty], None]:
    """Make runs of the test use an engine of this class."""

    def use(engine: Faulty) -> None:
        def make(config: TrainConfig, number: int) -> InlineHost:
            assert config.ckpt is not None
            return InlineHost(lambda: engine(str(config.ckpt), sampling_params(config)), f"engine-{number}")

        monkeypatch.setattr(trainer_module, "make_rollout_host", make)

    return use


def fit(config: TrainConfig) -> RunResult:
    kind = AsyncPolicyTrainer if config.is_async else PolicyOnlyTrainer
    return kind(config, reward_fn=varied_reward, dataset=ROWS).fit()


def check_stopped(result: RunResult, kind: InputKind, *said: str) -> list[Record]:
    """The run failed with these words, on this operation, and no train step was begun after it; the log's rows.

    "N" in the words stands for the version that the operation was told to load, or to generate or train with.
    """
    assert (result.outcome, result.exit_code) == ("failed", 1), result.message
    rows = log_of(result.run.path)
    failure, *aborted = (row for row in rows if row.kind is RecordKind.INPUT and row.trigger == "failed")
    assert failure.reason == "LogprobMismatch"
    # What was in flight may end so, or well.
    assert {row.reason for row in aborted} <= {"OperationAborted", "RewardsAborted"}
    assert failure.cause_seq is not None
    refused = rows[failure.cause_seq]
    assert refused.trigger == kind
    for words in ("LogprobMismatch", "mean |difference|", "tokens", "--max-logprob-gap", *said):
        assert words.replace("version N", f"version {refused.train_version}") in result.message
    later = rows[failure.seq :]
    assert [row for row in later if row.kind is RecordKind.COMMAND and row.trigger == CommandKind.TRAIN] == []
    assert len(metrics_of(result.run.path)) == result.train_version
    return rows


@pytest.mark.parametrize("algo", ["grpo", "async-grpo"])
def test_a_tensor_damaged_on_the_way_is_refused(make_config: Make, algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = SharedMemoryTransport.publish

    def damaging(self: SharedMemoryTransport, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Snapshot:
        flip = version >= STALE_FROM
        sent = [(name, -tensor if flip and name == "lm_head.weight" else tensor) for name, tensor in tensors]
        assert any(name == "lm_head.weight" for name, _ in sent)
        return publish(self, sent, version)

    monkeypatch.setattr(SharedMemoryTransport, "publish", damaging)
    result = fit(make_config(algo=algo))
    rows = check_stopped(result, "load_weights", "engine 0 has loaded version N", "4 probe prompts", "12 tokens")
    assert result.train_version < 4
    # The engine of an asynchronous run may skip versions, so the first damaged one need not be the first of all.
    told = [row.train_version for row in rows if row.kind is RecordKind.COMMAND and row.trigger == "load_weights"]
    served = [row.rollout_version_last for row in rows if row.kind is RecordKind.VERSION and row.trigger == "load"]
    assert served == [version for version in told if version < STALE_FROM], "no damaged version serves"
    assert served == told[:-1], "and the first one ends the run"
    if algo == "grpo":
        assert told == [0, 1, 2]


def test_an_older_version_under_a_new_name_is_refused(make_config: Make, use: Callable[[Faulty], None]) -> None:
    use(Forgetful)
    result = fit(make_config(algo="grpo", lr=1e-2))
    check_stopped(result, "load_weights", "engine 0 has loaded version 2", "older version still in place")
    assert result.train_version == STALE_FROM


@pytest.mark.parametrize("algo", ["grpo", "async-grpo"])
def test_a_cache_older_than_the_weights_is_noticed(make_config: Make, use: Callable[[Faulty], None], algo: str) -> None:
    use(OldCache)
    result = fit(make_config(algo=algo, lr=1e-2, max_steps=6))
    rows = check_stopped(result, "generate", "generated with version N", "cache that is older than the weights")
    told = [row.train_version for row in rows if row.kind is RecordKind.COMMAND and row.trigger == "generate"]
    assert [version >= STALE_FROM for version in told] == [False] * (len(told) - 1) + [True], "the first such batch"
    if algo == "grpo":
        assert told == [0, 1, 2]


@pytest.mark.parametrize("engine", [OtherTemplate, OtherTemperature])
def test_what_the_engine_does_otherwise_is_noticed_before_the_first_step(
    make_config: Make, use: Callable[[Faulty], None], engine: Faulty
) -> None:
    use(engine)
    result = fit(make_config())
    check_stopped(result, "generate", "generated with version 0", "a prompt that the engine changed")
    assert result.train_version == 0


def test_an_engine_that_cannot_score_is_held_to_it_by_the_step(
    make_config: Make, use: Callable[[Faulty], None], model: Path
) -> None:
    use(OtherTemplateUnseen)
    result = fit(make_config(algo="grpo"))
    check_stopped(result, "train", "batch 0 was generated by engine 0 with version 0", "The step was not taken")
    assert result.train_version == 0


def test_what_was_learnt_before_a_refused_step_is_saved(make_config: Make, use: Callable[[Faulty], None]) -> None:
    use(OldCacheUnseen)
    result = fit(make_config(algo="grpo", lr=1e-2))
    rows = check_stopped(result, "train", "batch 2 was generated by engine 0 with version 2", "The step was not taken")
    assert [row.train_version for row in rows if row.kind is RecordKind.CHECKPOINT] == [2]


def test_an_engine_that_cannot_score_and_is_sound_runs_and_that_is_said(
    make_config: Make, use: Callable[[Faulty], None], capsys: pytest.CaptureFixture[str]
) -> None:
    use(CannotScore)
    assert fit(make_config()).exit_code == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("mismatch_unchecked") == 2, "once for loads, once for generations"


def test_without_a_limit_nothing_is_compared(make_config: Make, use: Callable[[Faulty], None]) -> None:
    use(OtherTemplate)
    assert fit(make_config(max_logprob_gap=0)).exit_code == 0


@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
def test_a_sound_run_never_trips(make_config: Make, admission: str) -> None:
    config = make_config(async_admission=admission, async_max_staleness=2, lr=1e-2, max_steps=12, max_logprob_gap=1e-5)
    result = fit(config)
    assert result.exit_code == 0, result.message


def test_rounding_of_bfloat16_does_not_trip_its_limit(make_config: Make) -> None:
    result = fit(make_config(dtype="bfloat16", lr=1e-2))
    assert result.exit_code == 0, result.message
    first = metrics_of(result.run.path)[0]
    assert first["staleness_max"] == 0
    assert 0 < first["logprob_gap"] < 0.2, "it is compared, and not alike to the bit"


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5, "temperature": 1.3}, {"top_p": 0.6, "top_k": 9}],
)
@pytest.mark.parametrize("algo", ["grpo", "gspo"])
def test_a_fresh_batch_has_mean_ratio_one(make_config: Make, algo: str, sampling: dict[str, Any]) -> None:
    result = fit(make_config(algo=algo, lr=1e-2, **sampling))
    assert result.exit_code == 0, result.message
    for line in metrics_of(result.run.path):
        assert line["staleness_max"] == 0
        assert line["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert line["logprob_gap_max"] < 1e-4


class Host:
    """Scores with what it is given."""

    def __init__(self, scores: Scores | None) -> None:
        self.scores = scores
        self.asked: list[tuple[Any, ...]] = []

    def submit(self, method: str, *args: Any) -> Future[Any]:
        self.asked.append((method, *args))
        future: Future[Any] = Future()
        future.set_result(self.scores)
        return future


class Scorer:
    def __init__(self, scores: Scores | None) -> None:
        self.scores = scores

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores | None:
        return self.scores


def gate(limit: float | None = 0.1, **fields: Any) -> MismatchGate:
    return MismatchGate(GapLimit(limit) if limit else None, ((5, 6, 7),), **fields)


def test_a_probe_belongs_to_its_version_and_goes_with_it() -> None:
    checked = gate()
    checked.exported(3, Scorer([(-1.0, -2.0)]))  # type: ignore[arg-type]
    host = Host([(-1.0, -2.25)])
    with pytest.raises(LogprobMismatch, match=r"engine 1 has loaded version 3 .* mean \|difference\| 0\.125, largest"):
        checked.check_load(1, 3, host)
    assert host.asked == [("score", ((5, 6, 7),), 1.0)]
    assert checked.gaps[1] == LogprobGap(2, 0.25, 0.25, 0.25)
    checked.check_load(1, 4, host)
    assert checked.gaps == {}, "nothing is known of version 4"
    checked.released(3)
    checked.check_load(1, 3, host)
    assert len(host.asked) == 1


@pytest.mark.parametrize("score", [float("nan"), float("-inf")])
def test_weights_that_training_has_ruined_are_not_taken_for_a_mismatch(score: float) -> None:
    checked = gate()
    with pytest.raises(FloatingPointError, match=r"after optimiser step 3 give logprobs .* not finite: .* lower --lr"):
        checked.exported(3, Scorer([(-1.0, score)]))  # type: ignore[arg-type]


def test_samples_are_scored_at_the_temperature_of_the_run() -> None:
    samples = tuple((Sample((9, 8), (-1.0, -2.0), "length"), Sample((1,), (-9.0,), "stop")) for _ in range(3))
    host = Host([(-5.0, -1.0, -2.0), (-1.0, -2.5)])
    found = gate(0.2, temperature=0.7).check_generation(0, ((5, 6), (7, 7), (4,)), Rollout(samples, 2, 2), host)
    assert host.asked == [("score", [(5, 6, 9, 8), (4, 9, 8)], 0.7)], (
        "the first sample of prompts spread over the batch"
    )
    assert found == LogprobGap(4, 0.5, -0.5, 0.5)
    assert gate().check_generation(0, ((5, 6),), Rollout(samples, 2, 3), host) is None, "weights changed meanwhile"
    assert gate(None).check_generation(0, ((5, 6),), Rollout(samples, 2, 2), host) is None


def test_a_generation_is_not_held_to_scores_of_weights_that_came_after_it() -> None:
    """With loads amid generations, an engine may begin one before it has scored what it has generated."""
    samples = tuple((Sample((9, 8), (-1.0, -2.0), "length"),) for _ in range(2))
    prompts, own = ((5, 6), (7, 7)), Rollout(samples, 2, 2)
    far = Host([(-5.0, -9.0, -9.0)] * 2)
    checked = gate()
    checked.check_load(0, 2, far)
    with pytest.raises(LogprobMismatch):
        checked.check_generation(0, prompts, own, far)
    checked.loading(0)
    assert checked.check_generation(0, prompts, own, far) is None, "it loads"
    checked.check_load(0, 3, far)
    assert checked.check_generation(0, prompts, own, far) is None, "it has loaded"
    assert len(far.asked) == 1
    checked.check_load(1, 2, far)

    class Loads(Host):
        def submit(self, method: str, *args: Any) -> Future[Any]:
            checked.loading(1)
            return super().submit(method, *args)

    assert checked.check_generation(1, prompts, own, Loads(far.scores)) is None, "it began to load meanwhile"


def test_only_a_fresh_batch_is_held_to_the_limit() -> None:
    fresh = train_batch(0, 3)
    assert gate().limit_of_step(fresh, 3) == GapLimit(0.1)
    assert gate().limit_of_step(train_batch(0, 2), 3) is None
    assert gate(None).limit_of_step(fresh, 3) is None


def test_a_batch_of_mixed_versions_is_not_taken_for_a_fresh_one() -> None:
    mixed = replace(sequence(), version_spans=((2, 1), (3, 1)))
    for stamp in (2, 3):
        batch = train_batch(0, stamp, train_sequences=(sequence(), mixed))
        assert batch.rollout_versions == {2, 3}
        assert gate().limit_of_step(batch, 3) is None
