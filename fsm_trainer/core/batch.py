"""The unit of the train queue: one materialised prompt batch of whole prompt groups."""

from __future__ import annotations

from dataclasses import dataclass


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
