"""What keeping samples costs: time of the writer's thread and size of a file. `python tools/bench_samples.py`."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from pathlib import Path

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.engines.base import Rollout, Sample
from fsm_trainer.trainers.samples import SampleWriter

PROMPTS, WARM_UP, BATCHES = 16, 5, 20


def main() -> None:
    """Print a line for the quickstart's shape and one for long completions."""
    for samples, tokens in ((16, 5), (64, 512)):
        with tempfile.TemporaryDirectory() as folder:
            seconds, size = measure(Path(folder), samples, tokens)
        count = PROMPTS * samples
        print(
            f"{count} samples of {tokens} tokens: {seconds * 1e3:.1f} ms of the thread and {size / 1e3:.0f} kB a batch"
        )


def measure(folder: Path, samples: int, tokens: int) -> tuple[float, float]:
    """Processor seconds of the thread, and bytes of the file, for one batch's three writes."""
    rollout = Rollout(tuple(tuple(_sample(tokens) for _ in range(samples)) for _ in range(PROMPTS)), 1, 1)
    flat = [sample for group in rollout.groups for sample in group]
    sequences = [_sequence(sample) for sample in flat]
    writer = SampleWriter(folder, ["reward_fn"], _raise)
    times: list[float] = []
    for batch_id in range(WARM_UP + BATCHES):
        if batch_id in (0, WARM_UP):
            _on_thread(writer, times)
        writer.begun(_prompts(batch_id), rollout, lambda: ["1234 " * (tokens // 2)] * len(flat))
        _on_thread(writer, [])  # so that no write is left out because a newer one waits
        writer.rewarded(batch_id, sequences, {"reward_fn": [1.0] * len(flat)})
        _on_thread(writer, [])
        writer.ended(batch_id, "trained", None)
    _on_thread(writer, times)
    writer.close(60)
    files = list(folder.iterdir())
    return (times[-1] - times[-2]) / BATCHES, sum(file.stat().st_size for file in files) / len(files)


def _on_thread(writer: SampleWriter, times: list[float]) -> None:
    """Wait for the thread, and note its processor time."""
    done = threading.Event()
    writer._thread.post(lambda: (times.append(time.thread_time()), done.set()))
    done.wait()


def _sample(tokens: int) -> Sample:
    ids = tuple(random.randrange(30_000) for _ in range(tokens))
    return Sample(ids, tuple(-random.random() for _ in range(tokens)), "length")


def _sequence(sample: Sample) -> TrainSequence:
    n = len(sample.tokens)
    return TrainSequence((1, 2, *sample.tokens), (0.0, 0.0, *sample.logprobs), 2, (0, 0, *(1,) * n), 0.5, 1.0)


def _prompts(batch_id: int) -> PromptBatch:
    rows = tuple({"prompt": "4821="} for _ in range(PROMPTS))
    return PromptBatch(batch_id, 0, tuple(range(PROMPTS)), rows, ("4821=",) * PROMPTS, ((1, 2),) * PROMPTS)


def _raise(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    main()
