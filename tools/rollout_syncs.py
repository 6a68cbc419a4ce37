"""What new weights cost: parts of tools/bench_rollout.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rollout_models import Batch, Engine, checkpoint, local_vllm, set_batch, vllm_server, weights
from rollout_speed import Row, Settings, timed

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.base import Loaded, RolloutRequest
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.vllm_rollout import VLLMRolloutEngine
from fsm_trainer.engines.weight_sync.choose import make_transport
from fsm_trainer.engines.weight_sync.transport import BUCKET_BYTES

STEPS = {"tiny": (256, 10, 5), "smollm2": (8, 128, 64), "qwen3-0.6b": (4, 128, 64)}
"""Of a training step: sequences, tokens of each, tokens of its completion. The first is the quickstart's."""
LONG = {"tiny": Batch(64, 1, 384), "smollm2": Batch(1, 8, 128), "qwen3-0.6b": Batch(1, 8, 32)}
"""Batches that weights are loaded into."""
LOADS = 3
"""While such a batch runs, at equal distances."""


def sync(settings: Settings) -> Iterator[tuple[str, Row]]:
    """Publishing and loading weights, what a step and a running generation lose to it, and how servers start."""
    for model in settings.models:
        step_s = _step_s(model, settings)
        tensors = weights(model, settings.folder)
        with local_vllm(model, settings.folder, settings.threads) as engine, TemporaryDirectory() as folder:
            for name in ("shared-memory", "directory"):
                yield "sync", cost(engine, model, "inline", name, tensors, Path(folder), settings.repeats, step_s)
            for keep_cache in (False, True):
                yield "generation lost to a load", lost(engine, model, tensors, settings.repeats, keep_cache)
        begin = time.perf_counter()
        with vllm_server(model, settings.folder, settings.threads) as engine:
            parts = engine.start()
            yield "start of a server", {"model": model, **parts, "all_s": time.perf_counter() - begin}
            root, repeats = settings.folder, settings.repeats
            yield "sync", cost(engine, model, "server", "shared-memory", tensors, root, repeats, step_s)


def cost(
    engine: Engine,
    model: str,
    mode: str,
    name: str,
    tensors: dict[str, Any],
    folder: Path,
    repeats: int,
    step_s: float,
) -> Row:
    """Medians of publishing, and of loading into an engine that has nothing to do. The first of each is left out."""
    transport = make_transport(name, bucket_bytes=BUCKET_BYTES, directory=folder / "weights")
    published, loads, walls = [], [], []
    for version in range(1, repeats + 2):
        begin = time.perf_counter()
        snapshot = transport.publish(tensors.items(), version)
        published.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        loads.append(engine.load_weights(snapshot))
        walls.append(time.perf_counter() - begin)
        transport.release(version)
    transport.close()
    publish_s, load_s = median(published[1:]), median(walls[1:])
    transfer_s = median(load.transfer_s for load in loads[1:])
    return {
        "model": model,
        "M parameters": sum({id(tensor): tensor.numel() for tensor in tensors.values()}.values()) / 1e6,
        "MB": snapshot.nbytes / 1e6,
        "engine": mode,
        "transport": name,
        "publish ms": 1e3 * publish_s,
        "publish GB/s": snapshot.nbytes / publish_s / 1e9,
        "load ms": 1e3 * load_s,
        "transfer ms": 1e3 * transfer_s,
        "transfer GB/s": snapshot.nbytes / transfer_s / 1e9,
        "step s": step_s,
        "share of a step %": 100 * (publish_s + load_s) / step_s,
    }


def lost(engine: VLLMRolloutEngine, model: str, tensors: dict[str, Any], repeats: int, keep_cache: bool) -> Row:
    """What a load takes from generation.

    In flight: by how much longer a batch takes if weights are loaded while it runs, a load; what ran is computed anew,
    or keeps its cache. Drained: the engine has nothing to do while it loads, so it is all of the load.
    """
    engine._keep_cache = keep_cache  # which a run never changes either
    batch, transport = LONG[model], make_transport("shared-memory", bucket_bytes=BUCKET_BYTES, directory=".")
    set_batch(engine, batch)
    snapshot = transport.publish(tensors.items(), 1)
    load = partial(engine.load_weights, snapshot)
    load()
    plain, longer, inside = [], [], []
    for number in range(repeats):
        plain.append(timed(partial(engine.generate, batch.request(number))))
        took, loads = _with_loads(engine, batch.request(number), load, plain[-1])
        if loads:
            longer.append((took - plain[-1]) / len(loads))
            inside.extend(loads)
    if not inside:
        print(
            f"  {model}: no batch of {batch.label} lasted until its first load, so none was measured", file=sys.stderr
        )
    idle = [timed(load) for _ in range(repeats)]
    transport.close()
    return {
        "model": model,
        "prompts x samples x tokens": batch.label,
        "cache": "keep" if keep_cache else "recompute",
        "generation s": median(plain),
        "drain: lost ms": 1e3 * median(idle),
        "inflight: lost ms": _median_ms(longer),
        "of that: pause": _median_ms([loaded.pause_s for loaded in inside]),
        "transfer": _median_ms([loaded.transfer_s for loaded in inside]),
        "resume": _median_ms([loaded.resume_s for loaded in inside]),
    }


def _median_ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * median(seconds) if seconds else None


def _with_loads(
    engine: VLLMRolloutEngine, request: RolloutRequest, load: Callable[[], Loaded], plain_s: float
) -> tuple[float, list[Loaded]]:
    """Seconds of a generation, and what was loaded while it ran: nothing, if it is over sooner than one before it."""
    loads = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(timed, partial(engine.generate, request))
        for _ in range(LOADS):
            wait([running], plain_s / (LOADS + 1))
            if not running.done():
                loads.append(load())
        return running.result(), loads


def _step_s(model: str, settings: Settings) -> float:
    """Seconds of a training step on random tokens."""
    sequences, length, completion = STEPS[model]
    rows = [_sequence(Batch(1, 1, 1, length).request(row).prompts[0], completion, row) for row in range(sequences)]
    engine = HFTrainEngine(
        checkpoint(model, settings.folder), threads=settings.threads, mini_bs=2 if model != "tiny" else 256
    )
    engine.start()
    taken = [timed(partial(engine.train, rows)) for _ in range(settings.repeats_of(model))]
    engine.close()
    return median(taken)


def _sequence(tokens: tuple[int, ...], completion: int, row: int) -> TrainSequence:
    prompt = len(tokens) - completion
    logprobs, mask = (0.0,) * prompt + (-3.0,) * completion, (0,) * prompt + (1,) * completion
    return TrainSequence(tokens, logprobs, prompt, mask, advantage=1.0 - 2.0 * (row % 2), reward=0.0)
