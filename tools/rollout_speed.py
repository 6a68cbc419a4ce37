"""How fast the engines draw tokens, and what ours adds to vLLM called directly: parts of tools/bench_rollout.py."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from rollout_models import Batch, Engine, checkpoint, local_vllm, set_batch, weights

from fsm_trainer.engines.base import Rollout, RolloutRequest, SamplingParams, Snapshot
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.engines.vllm_requests import group_seed, sampling_arguments
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.runtime.host import ProcessHost

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

Row = dict[str, Any]
BATCHES = {
    "tiny": (Batch(64, 1, 64), Batch(1, 8, 64), Batch(4, 8, 64)),
    "smollm2": (Batch(1, 8, 64), Batch(4, 8, 64)),
}
"""Of each model, those that are drawn; the largest would take minutes."""
_numbers = itertools.count()
"""Of batches; the prompts are shorter than a block of vLLM's prefix cache, so no batch finds another's there."""


@dataclass(frozen=True)
class Settings:
    """What the command was told."""

    folder: Path
    models: tuple[str, ...]
    repeats: int
    threads: int

    def among(self, models: Collection[str]) -> list[str]:
        """The models that were asked for, of some."""
        return [model for model in self.models if model in models]

    def repeats_of(self, model: str) -> int:
        """How often to measure what takes the smallest model so little that it varies more."""
        return self.repeats * (10 if model == "tiny" else 1)


def throughput(settings: Settings) -> Iterator[tuple[str, Row]]:
    """Tokens a second of both engines, which draw in turn, in one run with equal threads."""
    for model in settings.among(BATCHES):
        with ExitStack() as stack:
            vllm = stack.enter_context(local_vllm(model, settings.folder, settings.threads))
            hf = HFRolloutEngine(checkpoint(model, settings.folder), SamplingParams(), threads=settings.threads)
            hf.start()
            stack.callback(hf.close)
            _load(model, settings, vllm, hf)
            for batch in BATCHES[model]:
                engines: dict[str, Engine] = {"vllm": vllm, "hf": hf}
                seconds: dict[str, list[float]] = {name: [] for name in engines}
                for engine in engines.values():
                    _warm_up(engine, batch)
                for _ in range(settings.repeats):
                    for name, engine in engines.items():
                        seconds[name].append(timed(partial(engine.generate, batch.request(next(_numbers)))))
                yield (
                    "tokens a second",
                    {
                        "model": model,
                        "prompts x samples x tokens": batch.label,
                        **{f"{name} tok/s": batch.tokens / median(taken) for name, taken in seconds.items()},
                        "vllm / hf": median(h / v for v, h in zip(seconds["vllm"], seconds["hf"], strict=True)),
                    },
                )


def overhead(settings: Settings) -> Iterator[tuple[str, Row]]:
    """How much longer a batch takes through our engine than asked of vLLM directly, in turn on one vLLM."""
    for model in settings.among(BATCHES):
        with local_vllm(model, settings.folder, settings.threads) as engine:
            _load(model, settings, engine)
            for batch in BATCHES[model]:
                _warm_up(engine, batch)
                # One has no quarters.
                pairs = [_pair(engine, batch, i % 2 == 0) for i in range(max(2, settings.repeats_of(model)))]
                ratios = quantiles((ours.wall_s / direct.wall_s - 1 for ours, direct in pairs), method="inclusive")
                yield (
                    "overhead over vLLM called directly",
                    {
                        "model": model,
                        "prompts x samples x tokens": batch.label,
                        "pairs": len(pairs),
                        "direct ms": 1e3 * median(direct.wall_s for _, direct in pairs),
                        "ours ms": 1e3 * median(ours.wall_s for ours, _ in pairs),
                        "overhead %": 100 * ratios[1],
                        "middle half %": f"{100 * ratios[0]:.1f} to {100 * ratios[2]:.1f}",
                        "more cpu ms": 1e3 * median(ours.cpu_s - direct.cpu_s for ours, direct in pairs),
                        "pipe ms": _pipe_ms(engine.generate(batch.request(next(_numbers)))),
                    },
                )


def timed(do: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Took:
    """One batch, in seconds of the clock and of this process's processor time, which a busy machine changes less."""

    wall_s: float
    cpu_s: float


def _pair(engine: VLLMRolloutEngine, batch: Batch, ours_first: bool) -> tuple[Took, Took]:
    """One batch through our engine and directly; whichever goes first."""
    number = next(_numbers)
    if ours_first:
        ours = _through_ours(engine, batch.request(number))
        return ours, directly(engine, batch.request(number))[0]
    direct, _ = directly(engine, batch.request(number))
    return _through_ours(engine, batch.request(number)), direct


def _through_ours(engine: VLLMRolloutEngine, request: RolloutRequest) -> Took:
    began, cpu = time.perf_counter(), time.process_time()
    engine.generate(request)
    return Took(time.perf_counter() - began, time.process_time() - cpu)


def directly(engine: VLLMRolloutEngine, request: RolloutRequest) -> tuple[Took, list[RequestOutput]]:
    """Until vLLM has given all final outputs of the same requests, on the event loop that it lives on; and these."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    backend: Any = engine._backend
    arguments = sampling_arguments(engine._sampling, engine._eos)

    async def one(index: int, prompt: tuple[int, ...]) -> RequestOutput:
        seed, kind = group_seed(request, index), RequestOutputKind.FINAL_ONLY
        params = VLLMSamplingParams(**arguments, seed=seed, output_kind=kind)
        name = f"direct-{request.batch_id}-{index}"
        final: RequestOutput | None = None
        async for output in backend._llm.generate(TokensPrompt(prompt_token_ids=list(prompt)), params, name):
            final = output
        assert final is not None
        return final

    async def all_of_them() -> tuple[Took, list[RequestOutput]]:
        began, cpu = time.perf_counter(), time.process_time()
        outputs = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(request.prompts)))
        return Took(time.perf_counter() - began, time.process_time() - cpu), outputs

    assert engine._loop is not None
    measured: tuple[Took, list[RequestOutput]] = engine._loop.submit(all_of_them()).result()
    return measured


def _pipe_ms(rollout: Rollout) -> float:
    """What a rollout's way out of an engine process takes besides: `--rollout-host process`."""
    host = ProcessHost(partial(dict, rollout=rollout))
    try:
        host.submit("get", "rollout").result()
        return 1e3 * median(timed(host.submit("get", "rollout").result) for _ in range(5))
    finally:
        host.kill()


def _load(model: str, settings: Settings, *engines: Engine) -> None:
    transport = SharedMemoryTransport()
    snapshot: Snapshot = transport.publish(weights(model, settings.folder).items(), 1)
    for engine in engines:
        engine.load_weights(snapshot)
    transport.close()


def _warm_up(engine: Engine, batch: Batch) -> None:
    """First calls are slower; a few tokens are enough, of a batch as wide."""
    set_batch(engine, Batch(batch.prompts, batch.samples, 4, batch.prompt_tokens))
    engine.generate(batch.request(next(_numbers)))
    set_batch(engine, batch)
