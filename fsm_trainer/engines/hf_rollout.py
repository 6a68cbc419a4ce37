"""The transformers rollout engine: batched sampling with a KV cache, on the CPU or one GPU.

Its own loop rather than `generate`, because the logprobs of the sampled tokens under the policy at the sampling
temperature must come out, the same seed must give the same tokens on any instance, and another thread must be able
to stop it between two tokens. Knows nothing of rewards, batches in a queue, or when to load weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsm_trainer.engines.base import Loaded, Rollout, RolloutRequest, Sample, SamplingParams, Scores, Snapshot
from fsm_trainer.engines.hf_lora import LoraSettings, attach_lora
from fsm_trainer.engines.hf_model import (
    SpecialTokens,
    cache_argument,
    check_prompts,
    load_model,
    load_tokenizer,
    set_threads,
    special_tokens,
)
from fsm_trainer.engines.hf_sampling import batch_uniforms, check_sampling, draw, filtered, policy_logprobs
from fsm_trainer.engines.hf_score import score_sequences
from fsm_trainer.engines.weight_sync.transport import read_snapshot

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


class HFRolloutEngine:
    """A `RolloutEngine` on transformers. `start` builds the model; it serves only after a first `load_weights`."""

    def __init__(
        self,
        ckpt: str,
        sampling: SamplingParams,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        lora: LoraSettings | None = None,
    ) -> None:
        """Keep the settings. `ckpt` gives the architecture; the weights come from snapshots.

        With `lora`, those of the train engine, the snapshots hold the adapters and `ckpt` all other weights.
        """
        check_sampling(sampling)
        self._ckpt, self._sampling = ckpt, sampling
        self._device, self._dtype, self._threads = device, dtype, threads
        self._lora = lora
        self._model: PreTrainedModel | None = None
        self._served: dict[str, torch.nn.Parameter] = {}
        self._special = SpecialTokens((), 0)
        self._version: int | None = None
        self._aborted = threading.Event()

    def start(self) -> None:
        """Build the model."""
        set_threads(self._threads)
        self._model = load_model(self._ckpt, self._device, self._dtype)
        if self._lora is not None:
            attach_lora(self._model, self._lora)
        named = self._model.named_parameters(remove_duplicate=False)
        self._served = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._model.requires_grad_(False)
        self._special = special_tokens(self._model, load_tokenizer(self._ckpt))

    def load_weights(self, snapshot: Snapshot) -> Loaded:
        """Install a snapshot of every trained parameter; after a failure part way the engine serves nothing."""
        begin = time.perf_counter()
        set_threads(self._threads)
        self._ready_model()
        parameters = self._served
        tensors = dict(read_snapshot(snapshot))
        _check_coverage(parameters, tensors)
        self._version = None
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)
        if (device := self._ready_model().device).type == "cuda":
            torch.cuda.synchronize(device)  # the tensors are the publisher's, who may use them again after this
        self._version = snapshot.version
        return Loaded(snapshot.version, snapshot.nbytes, transfer_s=time.perf_counter() - begin)

    @torch.inference_mode()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Complete every prompt `n_samples` times."""
        self._aborted.clear()
        model = self._ready_model()
        if self._version is None:
            raise RuntimeError("no weights loaded: load_weights must succeed before generate")
        if not request.prompts:
            raise ValueError(f"batch {request.batch_id} has no prompts, expected at least one")
        set_threads(self._threads)
        check_prompts(model.config, request.prompts, self._sampling.max_new_tokens)
        tokens, logprobs = self._sample(model, request)
        if not bool(torch.isfinite(logprobs).all()):
            raise FloatingPointError(f"weights of version {self._version} give logprobs that are not finite")
        return Rollout(self._groups(tokens, logprobs), self._version, self._version)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Scores:
        """Score given tokens with the weights served now, in passes of their own."""
        model = self._ready_model()
        if self._version is None:
            raise RuntimeError("no weights loaded: load_weights must succeed before score")
        set_threads(self._threads)
        return score_sequences(model, sequences, pad=self._special.pad, temperature=temperature)

    def abort(self) -> None:
        """Make a running `generate` raise before its next token."""
        self._aborted.set()

    def close(self) -> None:
        """Drop the model."""
        self._model, self._version = None, None
        self._served = {}

    def _ready_model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("the rollout engine is not started, or closed")
        return self._model

    def _sample(self, model: PreTrainedModel, request: RolloutRequest) -> tuple[Tensor, Tensor]:
        """Return tokens and logprobs, [rows, steps]; a row's entries after its EOS mean nothing."""
        n, steps = self._sampling.n_samples, self._sampling.max_new_tokens
        rows = len(request.prompts) * n
        device = model.device
        uniforms = batch_uniforms(request.seed, request.batch_id, rows, steps).to(device)
        eos, greedy = torch.tensor(self._special.eos, device=device), self._sampling.temperature == 0.0
        tokens = torch.full((rows, steps), self._special.eos[0], device=device)
        logprobs = torch.zeros(rows, steps, device=device)
        decoder = _Decoder(model, request.prompts, self._special.pad)
        logits = decoder.prefill().repeat_interleave(n, dim=0)
        decoder.repeat(n)
        alive = torch.arange(rows, device=device)
        going = torch.ones(rows, dtype=torch.bool, device=device)
        for step in range(steps):
            if self._aborted.is_set():
                raise RuntimeError("generation aborted")
            policy = policy_logprobs(logits, self._sampling.temperature)
            drawn = draw(filtered(policy, self._sampling), uniforms[alive, step], greedy=greedy)
            # Of the policy, not of what top-k and top-p leave of it: the trainer's ratio is to the policy.
            scores = policy.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
            tokens[alive, step], logprobs[alive, step] = drawn, scores
            going &= ~torch.isin(drawn, eos)
            left = int(going.sum())
            if left == 0 or step + 1 == steps:
                break
            # Finished rows cost as much as live ones; dropping them copies the cache, so only once half are done.
            if left <= len(alive) // 2:
                decoder.select(going)
                alive, drawn, going = alive[going], drawn[going], going[going]
            logits = decoder.decode(drawn)
        return tokens, logprobs

    def _groups(self, tokens: Tensor, logprobs: Tensor) -> tuple[tuple[Sample, ...], ...]:
        samples = [
            _cut(row, scores, self._special.eos) for row, scores in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ]
        n = self._sampling.n_samples
        return tuple(tuple(samples[start : start + n]) for start in range(0, len(samples), n))


class _Decoder:
    """One batch's way through the model: left-padded prompts first, then one token a row, with the cache in between."""

    def __init__(self, model: PreTrainedModel, prompts: tuple[tuple[int, ...], ...], pad: int) -> None:
        from transformers import DynamicCache

        self._model, self._cache_name = model, cache_argument(model)
        self._cache: DynamicCache = DynamicCache(config=model.config)
        width = max(map(len, prompts))
        self._ids = torch.tensor([(pad,) * (width - len(p)) + tuple(p) for p in prompts], device=model.device)
        self._mask: Tensor | None = None
        self._next: Tensor | None = None
        # Prompts of one length need neither mask nor positions, and run faster without.
        if any(len(p) != width for p in prompts):
            self._mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)

    def prefill(self) -> Tensor:
        """Run the prompts, once each, and return the logits after them."""
        positions = None
        if self._mask is not None:
            positions = (self._mask.cumsum(dim=-1) - 1).clamp(min=0)
            self._next = positions[:, -1:] + 1
        return self._forward(self._ids, positions)

    def repeat(self, n: int) -> None:
        """Make n rows of each prompt."""
        self._cache.batch_repeat_interleave(n)
        if self._mask is not None and self._next is not None:
            self._mask, self._next = self._mask.repeat_interleave(n, dim=0), self._next.repeat_interleave(n, dim=0)

    def select(self, keep: Tensor) -> None:
        """Go on with these rows only."""
        self._cache.batch_select_indices(keep.nonzero().squeeze(-1))
        if self._mask is not None and self._next is not None:
            self._mask, self._next = self._mask[keep], self._next[keep]

    def decode(self, tokens: Tensor) -> Tensor:
        """Append one token a row and return the logits after it."""
        positions = self._next
        if self._mask is not None and self._next is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=-1)
            self._next = self._next + 1
        return self._forward(tokens.unsqueeze(-1), positions)

    def _forward(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        arguments: dict[str, Any] = {self._cache_name: self._cache, "use_cache": True, "logits_to_keep": 1}
        output = self._model(input_ids=ids, attention_mask=self._mask, position_ids=positions, **arguments)
        logits: Tensor = output.logits[:, -1]
        return logits


def _cut(tokens: list[int], logprobs: list[float], eos: tuple[int, ...]) -> Sample:
    """Cut a row after its first EOS token."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in eos), None)
    # Rows stop being written at the end of the batch, not of the row; a row without EOS ran to the full length.
    reason = "length" if end is None else "stop"
    return Sample(tuple(tokens[:end]), tuple(logprobs[:end]), reason)


def _check_coverage(parameters: dict[str, torch.nn.Parameter], tensors: dict[str, Tensor]) -> None:
    covered = {id(parameters[name]) for name in tensors if name in parameters}
    for name, parameter in parameters.items():
        if id(parameter) not in covered:
            raise ValueError(f"the snapshot lacks parameter {name}; is it of the same model?")
    for name, tensor in tensors.items():
        if name not in parameters:
            raise ValueError(f"the snapshot holds {name}, which the model has no parameter for")
        got, expected = tuple(tensor.shape), tuple(parameters[name].shape)
        if got != expected:
            raise ValueError(f"parameter {name} has shape {got} in the snapshot, expected {expected}")
