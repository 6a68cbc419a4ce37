"""The transformers train engine: one optimiser step on one batch, on the CPU or one GPU.

Owns the trained weights, the optimiser and the learning-rate schedule; publishes weights through a transport. Knows
nothing of rollouts, queues or staleness: the batch's logprobs say all there is to say about its policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsm_trainer.algorithms.losses import LossFn, Normalizers, policy_loss
from fsm_trainer.algorithms.materialize import has_policy_gradient
from fsm_trainer.algorithms.microbatch import plan_by_rows, plan_by_tokens
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.algorithms.spans import in_loss
from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.base import Scores, Snapshot, TrainResult
from fsm_trainer.engines.hf_batch import check_sequences, input_length, normalizers
from fsm_trainer.engines.hf_checkpoint import load_state, load_weights, save_checkpoint, save_state
from fsm_trainer.engines.hf_lora import LoraSettings, attach_lora, trained_parameters
from fsm_trainer.engines.hf_model import load_model, load_tokenizer, set_threads, special_tokens
from fsm_trainer.engines.hf_optimizer import check_optimizer, make_optimizer
from fsm_trainer.engines.hf_policy import Policy, PolicySettings
from fsm_trainer.engines.hf_reference import FrozenWeights
from fsm_trainer.engines.hf_schedule import LRSchedule
from fsm_trainer.engines.hf_score import score_sequences
from fsm_trainer.engines.hf_step import backward
from fsm_trainer.engines.hf_throughput import model_shape, speed_metrics
from fsm_trainer.engines.logprob_gap import GapLimit, LogprobMismatch
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.engines.weight_sync.transport import WeightTransport

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

NONFINITE = ("error", "skip")


class HFTrainEngine:
    """A `TrainEngine` on transformers.

    Trained weights and optimiser state are float32; another `dtype` is that of the forward pass (autocast). The model
    stays in evaluation mode: with dropout, logprobs would differ from the rollout's for no reason.
    """

    def __init__(
        self,
        ckpt: str,
        *,
        objective: Objective | None = None,
        loss: LossFn = policy_loss,
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        optimizer: str = "adamw",
        lr_decay_style: str = "constant",
        warmup: int = 0,
        lr_decay_steps: int | None = None,
        min_lr: float = 0.0,
        grad_clip_norm: float | None = 1.0,
        nonfinite: str = "error",
        mini_bs: int = 16,
        gradient_accumulation_steps: int | None = None,
        max_tokens_per_micro_batch: int | None = None,
        temperature: float = 1.0,
        dtype: str = "float32",
        sequence_packing: str = "auto",
        gradient_checkpointing: bool = False,
        torch_compile: bool = False,
        lora: LoraSettings | None = None,
        reference_refresh_steps: int | None = None,
        device: str = "cpu",
        threads: int = 1,
        seed: int = 0,
        transport: WeightTransport | None = None,
    ) -> None:
        """Check and keep the settings.

        `objective` None is GRPO's; `grad_clip_norm` None or 0 does not clip. `nonfinite` says what becomes of a loss or
        gradient that is no finite number: "error" raises, "skip" takes no step and counts it.
        `max_tokens_per_micro_batch`, if given, cuts a batch instead of `mini_bs`.
        """
        check_optimizer(optimizer)
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite is {nonfinite!r}, expected one of {', '.join(NONFINITE)}")
        self._objective, self._loss = objective or Objective(), loss
        self._schedule = LRSchedule(lr, lr_decay_style, warmup, lr_decay_steps, min_lr)
        self._betas, self._weight_decay, self._optimizer_name = betas, weight_decay, optimizer
        self._max_norm, self._nonfinite = grad_clip_norm or math.inf, nonfinite
        self._mini_bs, self._accumulation = mini_bs, gradient_accumulation_steps
        self._max_tokens = max_tokens_per_micro_batch
        self._settings = PolicySettings(
            temperature=temperature,
            dtype=dtype,
            packing=sequence_packing,
            gradient_checkpointing=gradient_checkpointing,
            torch_compile=torch_compile,
        )
        self._lora = lora
        self._refresh_steps = reference_refresh_steps
        self._ckpt, self._device, self._threads, self._seed = ckpt, device, threads, seed
        self._transport = transport or SharedMemoryTransport()
        self._model: PreTrainedModel | None = None
        self._reference: FrozenWeights | None = None
        self._steps = self._skipped = 0
        # Settings that cut no batch are refused now, and not at the first one.
        self._plan([], packed=False)

    def start(self) -> None:
        """Load the model and build the optimiser."""
        set_threads(self._threads)
        # Weights that are not trained may be kept as they are computed with.
        model = load_model(self._ckpt, self._device, self._settings.dtype if self._lora else "float32", seed=self._seed)
        self._tokenizer = load_tokenizer(self._ckpt)
        self._pad = special_tokens(model, self._tokenizer).pad
        self._saved: PreTrainedModel | PeftModel = model
        if self._lora is not None:
            self._saved = attach_lora(model, self._lora, self._seed)
        self._parameters = [parameter for _, parameter in trained_parameters(model)]
        self._optimizer = make_optimizer(
            self._optimizer_name,
            self._parameters,
            lr=self._schedule.lr,
            betas=self._betas,
            weight_decay=self._weight_decay,
        )
        if self._objective.needs_reference:
            self._reference = FrozenWeights(self._parameters, self._refresh_steps)
        self._shape = model_shape(model)
        self._policy = Policy(model, self._settings, self._pad)
        # Last: an engine whose start failed holds no model.
        self._model = model

    def train(self, sequences: Sequence[TrainSequence], max_gap: GapLimit | None = None) -> TrainResult:
        """Take one optimiser step, or none when the loss has no gradient. On an error no weight has changed."""
        started = time.perf_counter()
        config, policy = self._ready_model().config, self._policy
        set_threads(self._threads)
        check_sequences(config, sequences)
        sequences = in_loss(sequences, self._objective)
        parts = self._plan(sequences, packed=policy.packed)
        totals = normalizers(sequences)
        lr = self._schedule.at(self._steps)
        common = {"lr": lr, "loss_tokens": float(totals.tokens), "skipped_steps": float(self._skipped)}
        if not self._has_gradient(sequences, totals):
            return TrainResult(False, self._steps, common)
        self._optimizer.zero_grad(set_to_none=True)
        batches = [batch for part in parts if (batch := policy.collate([sequences[row] for row in part])) is not None]
        report = backward(policy, batches, totals, self._objective, self._loss, self._reference)
        if max_gap is not None and not max_gap.admits(report.gap):
            self._optimizer.zero_grad(set_to_none=True)
            raise LogprobMismatch(f"{report.gap}; the limit is {max_gap}", report.gap)
        norm = self._finite_norm(report.loss)
        if norm is None:
            self._skipped += 1
            return TrainResult(False, self._steps, {**common, "skipped_steps": float(self._skipped)})
        self._step(lr, norm)
        speed = self._speed(policy, sequences, totals.tokens, started)
        numbers = {**report.metrics.as_floats(), **common, **speed, "grad_norm": float(norm)}
        return TrainResult(True, self._steps, numbers, report.metrics.rates)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores:
        """Score given tokens with the current weights, computed as a step computes them."""
        model = self._ready_model()
        set_threads(self._threads)
        with self._policy.autocast():
            return score_sequences(model, sequences, pad=self._pad, temperature=temperature)

    def export(self, version: int) -> Snapshot:
        """Publish the current weights; with LoRA the adapters alone."""
        return self._transport.publish(trained_parameters(self._ready_model()), version)

    def release(self, version: int) -> None:
        """Free a published version."""
        self._transport.release(version)

    def save(self, directory: str) -> None:
        """Write a checkpoint and what `restore` needs besides; with LoRA the adapters alone."""
        model = self._ready_model()
        save_checkpoint(self._saved, self._tokenizer, directory)
        save_state(
            directory,
            dict(trained_parameters(model)),
            self._optimizer,
            reference=self._changing_reference(),
            counters={"steps": self._steps, "skipped": self._skipped},
        )

    def restore(self, directory: str) -> int:
        """Go on from what `save` wrote; returns the optimiser steps taken before."""
        model = self._ready_model()
        load_weights(directory, self._saved, adapters=self._lora is not None)
        parameters, reference = dict(trained_parameters(model)), self._changing_reference()
        counters = load_state(directory, parameters, self._optimizer, reference=reference)
        self._steps, self._skipped = counters["steps"], counters["skipped"]
        return self._steps

    def close(self) -> None:
        """Free the model and every published version."""
        self._transport.close()
        if self._model is not None:
            self._model = self._reference = None
            del self._policy, self._optimizer, self._parameters, self._saved

    def _changing_reference(self) -> list[Tensor] | None:
        """The reference's copy, if it is not the weights that every run starts from."""
        return None if self._reference is None or self._refresh_steps is None else self._reference.tensors

    def _ready_model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("the train engine is not started, or closed")
        return self._model

    def _plan(self, sequences: Sequence[TrainSequence], *, packed: bool) -> tuple[tuple[int, ...], ...]:
        """Cut a batch into micro-batches of rows that are read."""
        lengths = [input_length(sequence) for sequence in sequences]
        if self._max_tokens is None:
            return plan_by_rows(lengths, self._mini_bs, self._accumulation)
        return plan_by_tokens(lengths, self._max_tokens, packed=packed)

    def _has_gradient(self, sequences: Sequence[TrainSequence], totals: Normalizers) -> bool:
        if totals.tokens == 0:
            return False
        return self._objective.moves_without_advantages or any(map(has_policy_gradient, sequences))

    def _speed(
        self, policy: Policy, sequences: Sequence[TrainSequence], loss_tokens: int, started: float
    ) -> dict[str, float]:
        if policy.model.device.type == "cuda":
            torch.cuda.synchronize(policy.model.device)
        lengths = [len(sequence.tokens) for sequence in sequences]
        seconds = time.perf_counter() - started
        return speed_metrics(self._shape, lengths, loss_tokens, seconds, policy.model.device, policy.dtype)

    def _finite_norm(self, loss: float) -> Tensor | None:
        """The gradients' norm; if it or the loss is not finite, None or an error, and no gradient is left."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for name, value in (("loss", loss), ("gradient norm", float(norm))):
            if not math.isfinite(value):
                self._optimizer.zero_grad(set_to_none=True)
                if self._nonfinite == "skip":
                    return None
                raise FloatingPointError(
                    f"{name} is {value} at optimiser step {self._steps + 1}; the weights are unchanged since step "
                    f"{self._steps}: try a lower lr, or look at the batch's logprobs"
                )
        return norm

    def _step(self, lr: float, norm: Tensor) -> None:
        if self._max_norm < math.inf:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_norm, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._steps += 1
        if self._reference is not None:
            self._reference.after_step(self._steps)
