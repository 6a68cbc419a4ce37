"""What a rollout engine (`fake`, `hf`, `vllm`) and a train engine (`fake`, `hf`) must do.

Engines know nothing of the scheduler: they are called by one worker thread at a time (except `abort`, and rollout
engines that say they are concurrent), raise on failure, and report the policy version they really serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.logprob_gap import GapLimit


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. `top_k=-1` and `top_p=1.0` switch those filters off; temperature 0 is greedy."""

    n_samples: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class RolloutRequest:
    """One prompt batch to complete, `n_samples` times each prompt."""

    batch_id: int
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt."""
    seed: int
    """Fixes the samples: same seed, prompts and weights give the same tokens on engines of a kind, up to rounding."""


class VersionSpan(NamedTuple):
    """A run of tokens of one sample, all drawn with the weights of one policy version."""

    version: int
    tokens: int


@dataclass(frozen=True)
class Sample:
    """One completion."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the policy at the sampling temperature, before top-k and top-p: that
    is what the trainer computes, so their ratio is 1 while the weights are the same."""
    finish_reason: str
    """"stop" (the EOS token is the last of `tokens`) or "length"."""
    spans: tuple[VersionSpan, ...] = ()
    """Which version drew which tokens, in order, when weights were loaded meanwhile; empty: one version drew all."""


@dataclass(frozen=True)
class Rollout:
    """All samples of one batch, grouped by prompt, with the oldest policy version at any sample's first token and the
    newest at any sample's last one. Where tokens may be drawn over a cache of still older weights, the first is theirs.
    """

    groups: tuple[tuple[Sample, ...], ...]
    version_first: int
    version_last: int


@dataclass(frozen=True)
class Snapshot:
    """Where one version's weights are, and how they are had; made by `WeightTransport.publish`."""

    version: int
    location: str
    nbytes: int
    transport: str = "shared-memory"
    """One of `weight_sync.transport.TRANSPORTS`."""
    payload: bytes = b""
    """What a reader needs besides the location; each transport has its own form."""


@dataclass(frozen=True)
class Loaded:
    """What one `load_weights` did, and what it cost."""

    version: int
    """The version now served."""
    nbytes: int = 0
    """Of the weights that came over."""
    pause_s: float = 0.0
    """Until what ran, generations and scoring, stood still; 0 when nothing did."""
    transfer_s: float = 0.0
    """Reading and installing the weights."""
    resume_s: float = 0.0
    """Until it went on; 0 likewise."""


class EngineLost(RuntimeError):  # noqa: N818 - an event that befell the engine, like EngineDied
    """An engine cannot serve any more until it is started anew: it is gone, not the one it was, or without weights."""


Scores = list[tuple[float, ...]]
"""For each sequence the natural-log probability, at a temperature, of every token but the first given those before."""


@dataclass(frozen=True)
class TrainResult:
    """What one `train` call did."""

    stepped: bool
    """False when no optimiser step was taken (nothing to learn from, or a skipped non-finite gradient)."""
    train_version: int
    """Optimiser steps this engine has taken, those before a restored checkpoint included."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Value of every metric of `trainers/metric_names.py` that the step measured."""
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Numerator and denominator of those metrics that are rates."""


class RolloutEngine(Protocol):
    """Generates completions with one policy version at a time.

    An engine whose class has `concurrent = True` is called by several threads at once: by `generate` and `score` of
    several batches, by `load_weights` while they run (`--async-sync-mode inflight`), and by `close` beside calls that
    hang; others do one call after the other.
    """

    def start(self) -> dict[str, float] | None:
        """Build the model; called once, before anything else. May say how many seconds its parts took, by name."""

    def load_weights(self, snapshot: Snapshot) -> Loaded:
        """Install a snapshot's weights; say which version is served now and what the load cost.

        What is generated or scored meanwhile (concurrent engines only) goes on with the new weights, or raises
        EngineLost if the load fails.
        """

    def generate(self, request: RolloutRequest) -> Rollout:
        """Complete every prompt of the batch."""

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores | None:
        """Score given tokens with the weights served now, using no cache of earlier calls.

        None where the engine cannot; what is checked with it is then left unchecked, and that is said. Amid a load
        (concurrent engines only) the scores may be of either version; the caller knows what it has ordered.
        """

    def abort(self) -> None:
        """Make whatever `generate` runs raise soon, of a concurrent engine `score` too; called from another thread.

        A no-op when idle.
        """

    def close(self) -> None:
        """Free everything; called once. Of a concurrent engine also beside calls that hang, which it makes raise."""


class TrainEngine(Protocol):
    """Owns the trained weights and the optimiser."""

    def start(self) -> None:
        """Build model and optimiser; called once, before anything else."""

    def train(self, sequences: Sequence[TrainSequence], max_gap: GapLimit | None = None) -> TrainResult:
        """Take one optimiser step on one batch. Raises FloatingPointError on a non-finite loss or gradient norm.

        `max_gap` is given for a batch that the current weights generated: LogprobMismatch, and no step, when its
        logprobs are further from the trainer's own.
        """

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores | None:
        """Score given tokens with the current weights; None where the engine cannot."""

    def export(self, version: int) -> Snapshot:
        """Publish the current weights as `version`."""

    def release(self, version: int) -> None:
        """Free a published snapshot that no engine will load any more."""

    def save(self, directory: str) -> None:
        """Write into a folder what `from_pretrained` loads and what `restore` needs; complete when it returns."""

    def restore(self, directory: str) -> int:
        """Go on from what `save` wrote, as if never stopped; called after `start`. Returns the steps taken before."""

    def close(self) -> None:
        """Free everything, published snapshots included; called once."""
