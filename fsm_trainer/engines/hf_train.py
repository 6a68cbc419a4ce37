"""The transformers train engine: one optimiser step on one batch, on the CPU or one GPU.

Owns the trained weights, the optimiser and the learning-rate schedule; publishes weights through a transport. Knows
nothing of rollouts, queues or staleness: the batch's logprobs say all there is to say about its policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsm_trainer.algorithms.losses import LossFn, LossInputs, LossOutput, Normalizers, merge, policy_loss
from fsm_trainer.algorithms.materialize import has_policy_gradient
from fsm_trainer.algorithms.microbatch import micro_batch_slices
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.base import Scores, Snapshot, TrainResult
from fsm_trainer.engines.hf_batch import MicroBatch, loss_inputs, normalizers, pack
from fsm_trainer.engines.hf_checkpoint import save_checkpoint
from fsm_trainer.engines.hf_model import load_model, load_tokenizer, resolve_dtype, set_threads, special_tokens
from fsm_trainer.engines.hf_schedule import LRSchedule
from fsm_trainer.engines.hf_score import gap_of, gap_sums, score_sequences
from fsm_trainer.engines.logprob_gap import GapLimit, LogprobGap, LogprobMismatch
from fsm_trainer.engines.weights import SharedMemoryTransport, WeightTransport

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HFTrainEngine:
    """A `TrainEngine` on transformers.

    Weights and optimiser state are float32; another `dtype` is that of the forward pass (autocast). The model
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
        lr_decay_style: str = "constant",
        warmup: int = 0,
        lr_decay_steps: int | None = None,
        min_lr: float = 0.0,
        grad_clip_norm: float | None = 1.0,
        mini_bs: int = 16,
        gradient_accumulation_steps: int | None = None,
        temperature: float = 1.0,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        seed: int = 0,
        transport: WeightTransport | None = None,
    ) -> None:
        """Check and keep the settings.

        `objective` None is GRPO's, `loss` computes it. `grad_clip_norm` None or 0 does not clip. `temperature` is the
        rollout's; 0 (greedy) recorded untempered logprobs: it is 1 here.
        """
        if resolve_dtype(dtype) == torch.float16:
            raise ValueError("dtype is 'float16', whose gradients underflow; train in 'bfloat16' or 'float32'")
        micro_batch_slices(0, mini_bs, gradient_accumulation_steps)
        self._objective, self._loss = objective or Objective(), loss
        self._schedule = LRSchedule(lr, lr_decay_style, warmup, lr_decay_steps, min_lr)
        self._betas, self._weight_decay = betas, weight_decay
        self._max_norm = grad_clip_norm or math.inf
        self._mini_bs, self._accumulation = mini_bs, gradient_accumulation_steps
        self._temperature = temperature or 1.0
        self._ckpt, self._device, self._dtype, self._threads, self._seed = ckpt, device, dtype, threads, seed
        self._transport = transport or SharedMemoryTransport()
        self._model: PreTrainedModel | None = None
        self._steps = 0

    def start(self) -> None:
        """Load the model and build the optimiser."""
        set_threads(self._threads)
        model = load_model(self._ckpt, self._device, seed=self._seed)
        self._tokenizer = load_tokenizer(self._ckpt)
        self._pad = special_tokens(model, self._tokenizer).pad
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Norms and biases are not decayed: shrinking them is no regularisation.
        groups = [
            {"params": [p for p in self._parameters if p.ndim >= 2], "weight_decay": self._weight_decay},
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=self._schedule.lr, betas=self._betas, fused=True)
        # Last: an engine whose start failed holds no model.
        self._model = model

    def train(self, sequences: Sequence[TrainSequence], max_gap: GapLimit | None = None) -> TrainResult:
        """Take one optimiser step, or none when the loss has no gradient. On an error no weight has changed."""
        model = self._ready_model()
        set_threads(self._threads)
        slices = micro_batch_slices(len(sequences), self._mini_bs, self._accumulation)
        totals = normalizers(sequences)
        lr = self._schedule.at(self._steps)
        if not self._has_gradient(sequences, totals):
            return TrainResult(False, self._steps, {"lr": lr, "loss_tokens": float(totals.tokens)})
        self._optimizer.zero_grad(set_to_none=True)
        metrics, gap = self._accumulate(model, [sequences[part] for part in slices], totals)
        if max_gap is not None and not max_gap.admits(gap):
            self._optimizer.zero_grad(set_to_none=True)
            raise LogprobMismatch(f"{gap}; the limit is {max_gap}", gap)
        metrics["grad_norm"] = self._clip(metrics["loss"])
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._steps += 1
        metrics |= {"lr": lr, "loss_tokens": float(totals.tokens), "logprob_gap_max": gap.largest}
        rates = {
            "logprob_gap": (gap.absolute, float(gap.tokens)),
            "logprob_gap_signed": (gap.signed, float(gap.tokens)),
        }
        metrics |= {name: numerator / denominator for name, (numerator, denominator) in rates.items()}
        return TrainResult(True, self._steps, metrics, rates)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores:
        """Score given tokens with the current weights, computed as a step computes them."""
        model = self._ready_model()
        set_threads(self._threads)
        with self._autocast(model):
            return score_sequences(model, sequences, pad=self._pad, temperature=temperature)

    def export(self, version: int) -> Snapshot:
        """Publish the current weights."""
        return self._transport.publish(self._ready_model().named_parameters(), version)

    def release(self, version: int) -> None:
        """Free a published version."""
        self._transport.release(version)

    def save(self, directory: str) -> None:
        """Write a checkpoint, whole or not at all."""
        save_checkpoint(self._ready_model(), self._tokenizer, directory)

    def close(self) -> None:
        """Free the model and every published version."""
        self._transport.close()
        if self._model is not None:
            self._model = None
            del self._optimizer, self._parameters

    def _ready_model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("the train engine is not started, or closed")
        return self._model

    def _has_gradient(self, sequences: Sequence[TrainSequence], totals: Normalizers) -> bool:
        if totals.tokens == 0:
            return False
        return self._objective.moves_without_advantages or any(map(has_policy_gradient, sequences))

    def _accumulate(
        self, model: PreTrainedModel, parts: list[Sequence[TrainSequence]], totals: Normalizers
    ) -> tuple[dict[str, float], LogprobGap]:
        """Add up the gradients of all micro-batches; the batch's metrics, and its gap to the rollout's logprobs."""
        losses: list[Tensor] = []
        gaps: list[Tensor] = []
        outputs: list[LossOutput] = []
        for part in parts:
            batch = pack(part, self._pad, model.device)
            if batch is None:
                continue
            inputs = self._forward(model, batch)
            output = self._policy_loss(inputs, totals)
            output.loss.backward()  # type: ignore[no-untyped-call]
            losses.append(output.loss.detach())
            outputs.append(output)
            gaps.append(gap_sums(inputs.logprobs, inputs.rollout_logprobs, inputs.mask))
        return {"loss": float(torch.stack(losses).sum()), **merge(outputs).as_floats()}, gap_of(gaps, totals.tokens)

    def _forward(self, model: PreTrainedModel, batch: MicroBatch) -> LossInputs:
        with self._autocast(model):
            return loss_inputs(
                model, batch, temperature=self._temperature, entropy_gradient=self._objective.entropy_coef != 0.0
            )

    def _policy_loss(self, inputs: LossInputs, totals: Normalizers) -> LossOutput:
        return self._loss(inputs, totals, self._objective)

    def _autocast(self, model: PreTrainedModel) -> AbstractContextManager[object]:
        dtype = resolve_dtype(self._dtype)
        return torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def _clip(self, loss: float) -> float:
        """Clip the gradients and return their norm before; raise, leaving no gradient, when something is not finite."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for name, value in (("loss", loss), ("gradient norm", float(norm))):
            if not math.isfinite(value):
                self._optimizer.zero_grad(set_to_none=True)
                raise FloatingPointError(
                    f"{name} is {value} at optimiser step {self._steps + 1}; the weights are unchanged since step "
                    f"{self._steps}: try a lower lr, or look at the batch's logprobs"
                )
        if self._max_norm < math.inf:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_norm, norm)
        return float(norm)
