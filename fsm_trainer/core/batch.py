"""The unit of the train queue: one materialised prompt batch of whole prompt groups."""

from __future__ import annotations

from dataclasses import dataclass

VersionSpans = tuple[tuple[int, int], ...]
"""(policy version, tokens that it drew), in the order of the tokens."""


@dataclass(frozen=True)
class TrainSequence:
    """One sample, ready to train on. All per-token fields have the length of `tokens` (prompt + completion).

    Raises ValueError when they are not aligned.
    """

    tokens: tuple[int, ...]
    """Token ids, prompt first."""
    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the policy that generated it, at the sampling temperature and before
    top-k and top-p; 0.0 on the prompt."""
    prompt_len: int
    """Tokens of the prompt; `tokens[prompt_len:]` is the completion."""
    loss_mask: tuple[int, ...]
    """1 where a token takes part in the loss, 0 elsewhere; 0 on the prompt."""
    advantage: float
    """One scalar for the whole completion."""
    reward: float
    eos_token_id: int | None = None
    version_spans: VersionSpans = ()
    """Which version drew which tokens of the completion, when weights were loaded meanwhile; empty: one drew all."""

    def __post_init__(self) -> None:
        """Check alignment."""
        n = len(self.tokens)
        if len(self.logprobs) != n or len(self.loss_mask) != n:
            raise ValueError(
                f"tokens, logprobs and loss_mask must align: got {n}, {len(self.logprobs)} and {len(self.loss_mask)}"
            )
        if not 0 < self.prompt_len <= n:
            raise ValueError(f"prompt_len is {self.prompt_len}, expected 1 to {n}")
        if any(self.loss_mask[: self.prompt_len]) or any(self.logprobs[: self.prompt_len]):
            raise ValueError("logprobs and loss_mask must be 0 on the prompt")
        self._check_spans(n - self.prompt_len)

    def _check_spans(self, completion_len: int) -> None:
        spans = self.version_spans
        if not spans:
            return
        versions, counts = [version for version, _ in spans], [count for _, count in spans]
        if min(counts) < 1 or sum(counts) != completion_len:
            raise ValueError(
                f"version_spans {spans} has {sum(counts)} tokens, expected the {completion_len} of the completion with "
                f"at least 1 a span"
            )
        if any(later <= earlier for earlier, later in zip(versions, versions[1:], strict=False)):
            raise ValueError(f"version_spans {spans} must have versions that grow; put tokens of one version together")

    @property
    def old_tokens(self) -> int:
        """Tokens of the completion that an older version drew than its last one."""
        return sum(count for _, count in self.version_spans[:-1])


@dataclass(frozen=True)
class AsyncTrainBatch:
    """One prompt batch on its way from rollout to training."""

    train_sequences: tuple[TrainSequence, ...]
    rollout_policy_version: int
    """Policy version that the engine reports for the batch's first token."""
    epoch: int
    prompt_batch_id: int
    prompt_count: int
    sequence_count: int
    token_count: int
    """Prompt and completion tokens of all sequences."""
    reward_mean: float
    rollout_time_s: float
    reward_time_s: float
    materialize_time_s: float
    created_at_s: float
    """Seconds of the run's monotonic clock when the batch was materialised."""

    @property
    def rollout_versions(self) -> frozenset[int]:
        """Every policy version that is known to have drawn some of its tokens."""
        spans = (version for sequence in self.train_sequences for version, _ in sequence.version_spans)
        return frozenset((self.rollout_policy_version, *spans))
