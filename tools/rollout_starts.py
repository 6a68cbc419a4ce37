"""How long a vLLM engine takes to start, by part: a part of tools/bench_rollout.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from rollout_models import POSITIONS, Batch, checkpoint, weights
from rollout_speed import Row, Settings, timed

from fsm_trainer.engines.base import SamplingParams
from fsm_trainer.engines.vllm_local import vllm_engine
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.runtime.host import ProcessHost

SAMPLING = SamplingParams(n_samples=8, max_new_tokens=16)
FIRST = Batch(1, SAMPLING.n_samples, SAMPLING.max_new_tokens)
"""The batch that is drawn first."""


def start(settings: Settings) -> Iterator[tuple[str, Row]]:
    """Seconds until a first batch is drawn, as a run begins."""
    for model in settings.among(("tiny", "smollm2")):
        yield "start in a process of its own", _process(model, settings)


def _process(model: str, settings: Settings) -> Row:
    """As a run with `--rollout-engine vllm` does: a process, in it AsyncLLM, and vLLM's own process behind that."""
    ckpt = checkpoint(model, settings.folder)
    factory = partial(vllm_engine, ckpt, SAMPLING, max_model_len=POSITIONS, threads=settings.threads)
    begin = time.perf_counter()
    host = ProcessHost(factory)
    try:
        host.submit("abort").result()  # nothing to abort: it answers once the engine is made
        spawn_s = time.perf_counter() - begin
        parts: dict[str, float] = host.submit("start").result()
        return {"model": model, "spawn_s": spawn_s, **parts, **_first(host, model, settings)}
    finally:
        host.kill()


def _first(host: ProcessHost, model: str, settings: Settings) -> dict[str, Any]:
    transport = SharedMemoryTransport()
    snapshot = transport.publish(weights(model, settings.folder).items(), 1)
    load_s = timed(host.submit("load_weights", snapshot).result)
    first_s = timed(host.submit("generate", FIRST.request(0)).result)
    transport.close()
    return {"first load_s": load_s, "first batch_s": first_s}
