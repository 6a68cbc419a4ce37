"""How soon a server says that it lives while it works: a part of tools/bench_rollout.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean, median
from typing import Any

import httpx
from rollout_models import Batch, set_batch, vllm_server, weights
from rollout_speed import Row, Settings, timed

from fsm_trainer.engines.vllm_health import HEALTH
from fsm_trainer.engines.vllm_server import ServerBackend
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport

BATCHES = {"tiny": Batch(128, 8, 200), "smollm2": Batch(4, 8, 64)}
"""Of each model, one that is drawn; the first ends in one step with all that it wrote."""
SCORED = Batch(16, 1, 1, prompt_tokens=500)
"""What is scored."""
_BETWEEN_S = 0.02
"""How long after an answer it is asked again."""
_LIMIT_S = 120.0


def health(settings: Settings) -> Iterator[tuple[str, Row]]:
    """Milliseconds that /health takes during a generation, scoring, and loads."""
    for model in settings.among(BATCHES):
        transport = SharedMemoryTransport()
        snapshot = transport.publish(weights(model, settings.folder).items(), 1)
        with vllm_server(model, settings.folder, settings.threads) as engine:
            engine.start()
            engine.load_weights(snapshot)
            batch = BATCHES[model]
            set_batch(engine, batch)
            works: dict[str, Callable[[], Any]] = {
                f"generate {batch.label}": partial(engine.generate, batch.request(0)),
                f"score {SCORED.prompts} x {SCORED.prompt_tokens}": partial(engine.score, SCORED.request(0).prompts, 1),
                "load": partial(engine.load_weights, snapshot),
            }
            assert isinstance(engine._backend, ServerBackend)
            for what, work in works.items():
                row = answers(engine._backend.url, work, settings.repeats)
                yield "answers to /health", {"model": model, "while it does": what, **row}
        transport.close()


def answers(url: str, work: Callable[[], Any], repeats: int) -> Row:
    """How long /health takes while something is done so many times over."""
    over, taken = threading.Event(), []

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=_LIMIT_S) as client:
            while True:
                taken.append(timed(lambda: client.get(HEALTH).raise_for_status()))
                if over.wait(_BETWEEN_S):
                    return

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        took = [timed(work) for _ in range(repeats)]
    finally:
        over.set()
        asking.join()
    return {"takes s": median(took), "asked": len(taken), "mean ms": 1e3 * mean(taken), "worst ms": 1e3 * max(taken)}
