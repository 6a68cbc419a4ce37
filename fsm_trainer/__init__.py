"""fsm_trainer: asynchronous GRPO, GSPO, CISPO, Dr. GRPO and DAPO whose runs can be explained.

The names below are the public ones; each is imported when first used, so that importing the package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsm_trainer.algorithms.objective import Objective
    from fsm_trainer.algorithms.registry import AlgorithmSpec, get_algorithm, register_algorithm
    from fsm_trainer.config import TrainConfig
    from fsm_trainer.core.batch import AsyncTrainBatch, TrainSequence
    from fsm_trainer.core.batch_queue import QueueClosed
    from fsm_trainer.core.policy import is_stale, staleness_delta
    from fsm_trainer.runtime.train_queue import AsyncTrainBatchQueue
    from fsm_trainer.trainers import AsyncPolicyTrainer, PolicyOnlyTrainer, RunResult

_HOMES = {
    "AlgorithmSpec": "fsm_trainer.algorithms.registry",
    "AsyncPolicyTrainer": "fsm_trainer.trainers",
    "AsyncTrainBatch": "fsm_trainer.core.batch",
    "AsyncTrainBatchQueue": "fsm_trainer.runtime.train_queue",
    "Objective": "fsm_trainer.algorithms.objective",
    "PolicyOnlyTrainer": "fsm_trainer.trainers",
    "QueueClosed": "fsm_trainer.core.batch_queue",
    "RunResult": "fsm_trainer.trainers",
    "TrainConfig": "fsm_trainer.config",
    "TrainSequence": "fsm_trainer.core.batch",
    "get_algorithm": "fsm_trainer.algorithms.registry",
    "is_stale": "fsm_trainer.core.policy",
    "register_algorithm": "fsm_trainer.algorithms.registry",
    "staleness_delta": "fsm_trainer.core.policy",
}

__all__ = [
    "AlgorithmSpec",
    "AsyncPolicyTrainer",
    "AsyncTrainBatch",
    "AsyncTrainBatchQueue",
    "Objective",
    "PolicyOnlyTrainer",
    "QueueClosed",
    "RunResult",
    "TrainConfig",
    "TrainSequence",
    "get_algorithm",
    "is_stale",
    "register_algorithm",
    "staleness_delta",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fsm_trainer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
