"""`PolicyOnlyTrainer` and `AsyncPolicyTrainer`: one run from a checked configuration to its exit code.

Both are the same loop over the same helpers; what differs is what the configuration lets the scheduler do. This module
puts the parts together and takes them apart again, whatever happens in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import structlog

from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.algorithms.shaping import OverlongPenalty
from fsm_trainer.config import TrainConfig
from fsm_trainer.config.check_rewards import GivenRewards
from fsm_trainer.config.objective_settings import (
    make_advantage,
    make_objective,
    samples_dynamically,
)
from fsm_trainer.config.preflight import Inputs, plan_warnings
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Input, InputKind
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.data.datasets import Rows
from fsm_trainer.eventlog.schema import log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.runtime.clock import Clock, MonotonicClock
from fsm_trainer.runtime.inbox import ThreadInbox
from fsm_trainer.runtime.lanes import Lanes
from fsm_trainer.runtime.loop import EventLoop, Observer
from fsm_trainer.runtime.signals import stop_signals
from fsm_trainer.runtime.threads import brisk_switching
from fsm_trainer.runtime.train_queue import AsyncTrainBatchQueue
from fsm_trainer.trainers.closing import close_lanes, close_log, close_operations
from fsm_trainer.trainers.engines import make_rollout_host, make_train_engine, make_weight_transport
from fsm_trainer.trainers.metrics import StepMetrics
from fsm_trainer.trainers.mismatch import MismatchGate
from fsm_trainer.trainers.operations import RunOperations
from fsm_trainer.trainers.people_log import PeopleLog
from fsm_trainer.trainers.prepare import Prepared, prepare, prepare_for_queue
from fsm_trainer.trainers.progress import Display, ProgressTracker
from fsm_trainer.trainers.queue_operations import OnWeights, QueueOperations
from fsm_trainer.trainers.result import RunResult, run_result
from fsm_trainer.trainers.reward_policy import RewardPolicy
from fsm_trainer.trainers.rollout_operations import RolloutOperations
from fsm_trainer.trainers.run_directory import RunDirectory
from fsm_trainer.trainers.samples import make_sample_writer
from fsm_trainer.trainers.saving import Saver
from fsm_trainer.trainers.scoring import Scorer
from fsm_trainer.trainers.tracking import live_tracking

_log = structlog.get_logger("fsm_train")


class Trainer:
    """One run. `fit` may be called once."""

    asynchronous: bool
    """Which algorithms it takes."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        reward_fn: GivenRewards | None = None,
        dataset: Rows | None = None,
        display: Display | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        """Check everything that can be checked before a run; ValueError names what is wrong.

        `reward_fn` (a function, or several in a list) and `dataset` (rows with a `prompt`, as in a file) replace the
        configuration's paths.
        """
        if config.resume is None:
            self._check_kind(config)
        self._prepared = prepared or prepare(config, reward_fn=reward_fn, dataset=dataset)
        self.config = self._prepared.config
        self._check_kind(self.config)
        self._display = display
        self._fitted = False
        self._post: Callable[[Input], None] | None = None

    def _check_kind(self, config: TrainConfig) -> None:
        if config.is_async is not self.asynchronous:
            kind = "an asynchronous" if self.asynchronous else "a synchronous"
            raise ValueError(f"{type(self).__name__} runs {kind} algorithm, got {config.algo!r}")

    def fit(self) -> RunResult:
        """Train until done, stopped or failed; returns how it ended, with everything closed and on disk."""
        if self._fitted:
            raise ValueError("fit was called before; make a new trainer for another run")
        self._fitted = True
        if self._prepared.inputs is not None:
            for warning in plan_warnings(self.config, self._prepared.inputs):
                _log.warning(warning)
        if self._prepared.resume is not None:
            checkpoint = self._prepared.resume.checkpoint
            _log.info("run_resumed", checkpoint=str(checkpoint.path), train_version=checkpoint.train_version)
        run = RunDirectory.create(self.config)
        self._prepared.place_files()
        return self._run(run, self._scheduler_config())

    def stop(self) -> None:
        """Ask a running `fit` to end, from any thread: what Ctrl-C does. Called again, it ends at once."""
        if self._post is None:
            raise ValueError("nothing to stop: fit is not running")
        self._post(Input(InputKind.STOP, reason="user"))

    def _scheduler_config(self) -> SchedulerConfig:
        return self._prepared.scheduler_config()

    def _saver(self, run: RunDirectory) -> Saver:
        point = self._prepared.resume
        return Saver.of(run, self.config, None if point is None else point.checkpoint)

    @property
    def _inputs(self) -> Inputs:
        assert self._prepared.inputs is not None
        return self._prepared.inputs

    def _run(self, run: RunDirectory, config: SchedulerConfig) -> RunResult:
        clock = MonotonicClock()
        inbox = ThreadInbox(clock)
        self._post = inbox.put
        scheduler = Scheduler(config)
        failures: list[OSError] = []
        with ExitStack() as stack:
            # First, so that until all is closed a second stop cannot break off the closing.
            stack.enter_context(stop_signals(inbox.put))
            tracking = live_tracking(self.config, run, clock)
            stack.callback(tracking.close)
            metadata = log_metadata(config, self.config.model_dump(mode="json"), code_rev=code_rev())
            log = EventLogWriter(run.events, metadata=metadata, segment_bytes=self.config.log_segment_mb << 20)
            stack.callback(close_log, log, failures, compacts=self.config.log_compact)
            operations = self._operations(run, clock, inbox.put)
            stack.callback(close_operations, operations)
            lanes = Lanes(operations, inbox.put, clock)
            stack.callback(close_lanes, lanes)
            metrics = StepMetrics(run.metrics, operations.batch)
            stack.callback(metrics.close)
            progress = ProgressTracker(scheduler.status, lambda: metrics.last, config.max_steps, clock.now_ns)
            stack.enter_context(self._displayed(progress))
            observers: list[Observer] = [metrics, progress, PeopleLog(), operations, tracking]
            loop = EventLoop(scheduler, tracking.tap(log), inbox, lanes.dispatch, clock, observers)
            with brisk_switching():
                loop.run()
        self._post = None
        if failures and loop.log_failure is None:
            loop.log_failure = failures[0]
        return run_result(run, scheduler.state, loop, metrics.last, clock.now_ns() / 1e9)

    def _operations(self, run: RunDirectory, clock: Clock, post: Callable[[Input], None]) -> RunOperations:
        config, inputs = self.config, self._inputs
        buffer = config.overlong_buffer_tokens
        scorer = Scorer(
            inputs.tokenizer,
            inputs.rewards.make_executor(config),
            replace(get_algorithm(config.algo), advantage=make_advantage(config)),
            policy=RewardPolicy(inputs.rewards.weights, config.reward_on_error),
            overlong=OverlongPenalty(config.max_new_tokens, buffer, config.overlong_penalty) if buffer else None,
            groups_per_batch=config.batch_size if samples_dynamically(config) else None,
        )
        transport = make_weight_transport(config)
        return RolloutOperations(
            source=inputs.prompts,
            scorer=scorer,
            train_engine=make_train_engine(config, transport),
            transport=transport,
            make_host=lambda engine: make_rollout_host(config, engine),
            run=run,
            seed=config.seed,
            clock=clock,
            post=post,
            samples=make_sample_writer(config.log_samples, run.samples, scorer.functions, post),
            always_steps=make_objective(config).moves_without_advantages,
            gate=MismatchGate.of(config, inputs.prompts.first_prompts(config.sync_probe_prompts)),
            saver=self._saver(run),
        )

    @contextmanager
    def _displayed(self, progress: ProgressTracker) -> Iterator[None]:
        if self._display is None:
            yield
            return
        self._display.start(progress.read)
        try:
            yield
        finally:
            self._display.stop()


class PolicyOnlyTrainer(Trainer):
    """The synchronous loop: generate, reward, train, sync, one after the other (`--algo` without `async-`)."""

    asynchronous = False


class AsyncPolicyTrainer(Trainer):
    """Generation runs ahead of training within the staleness bound (`--algo async-...`).

    With `queue`, producers outside the run make the batches: it trains on what they put, checks staleness by their
    stamps, ends when the queue is closed and empty, and calls `on_weights` (on a worker thread) with each version
    published for them. A run that fails reports its error to the queue, so that every producer meets it.
    """

    asynchronous = True

    def __init__(
        self,
        config: TrainConfig,
        *,
        reward_fn: GivenRewards | None = None,
        dataset: Rows | None = None,
        queue: AsyncTrainBatchQueue | None = None,
        on_weights: OnWeights | None = None,
        display: Display | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        """Check everything that can be checked before a run; ValueError names what is wrong."""
        if queue is not None and (reward_fn is not None or dataset is not None):
            raise ValueError(
                "got a queue and a reward_fn or dataset: batches in a queue are generated and scored already"
            )
        if queue is None and on_weights is not None:
            raise ValueError(
                "got on_weights without a queue: only producers outside the run need to be told of weights"
            )
        if queue is not None:
            prepared = prepare_for_queue(config)
        super().__init__(config, reward_fn=reward_fn, dataset=dataset, display=display, prepared=prepared)
        self._queue = queue
        self._on_weights = on_weights

    def fit(self) -> RunResult:
        """Train until done, stopped or failed; returns how it ended, with everything closed and on disk."""
        if self._queue is None:
            return super().fit()
        try:
            result = super().fit()
        except BaseException as error:
            self._queue.report_error(error)
            raise
        if result.outcome == "failed":
            self._queue.report_error(RuntimeError(result.message))
        self._queue.close()
        return result

    def _scheduler_config(self) -> SchedulerConfig:
        config = super()._scheduler_config()
        if self._queue is None:
            return config
        # The queue's own timeout names the producers, so the scheduler's would only say less.
        deadlines = replace(config.deadlines, queue_s=0.0, load_prompts_s=0.0)
        return replace(
            config,
            admission="greedy",
            workers=1,
            engines=1,
            queue_size=1,
            prefetch=0,
            external_rollouts=True,
            deadlines=deadlines,
        )

    def _operations(self, run: RunDirectory, clock: Clock, post: Callable[[Input], None]) -> RunOperations:
        if self._queue is None:
            return super()._operations(run, clock, post)
        return QueueOperations(
            queue=self._queue,
            on_weights=self._on_weights,
            train_engine=make_train_engine(self.config, make_weight_transport(self.config)),
            run=run,
            timeout_s=self.config.async_queue_timeout_s or None,
            gate=MismatchGate.of(self.config),
            saver=self._saver(run),
        )


def code_rev() -> str:
    """Version of this package, for the log."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fsm-trainer")
    except PackageNotFoundError:
        return ""
