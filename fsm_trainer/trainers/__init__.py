"""Runs put together: the synchronous and the asynchronous trainer, and what they leave in the run's folder."""

from __future__ import annotations

from fsm_trainer.trainers.prepare import Prepared
from fsm_trainer.trainers.progress import Display
from fsm_trainer.trainers.result import RunResult
from fsm_trainer.trainers.trainer import AsyncPolicyTrainer, PolicyOnlyTrainer, Trainer

__all__ = ["AsyncPolicyTrainer", "PolicyOnlyTrainer", "RunResult", "Trainer", "build_trainer"]


def build_trainer(prepared: Prepared, *, display: Display | None = None) -> Trainer:
    """The trainer for a prepared run's algorithm."""
    kind = AsyncPolicyTrainer if prepared.config.is_async else PolicyOnlyTrainer
    return kind(prepared.config, display=display, prepared=prepared)
