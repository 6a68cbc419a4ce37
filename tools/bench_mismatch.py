"""How far the logprobs of trainer and rollout engine lie apart, what the mismatch gate notices, and what it costs.

    python tools/bench_mismatch.py --ckpt FOLDER [--dtype bfloat16] [--lr 1e-6 1e-5] [--prompt TEXT ...]

One trainer and one rollout engine on the same weights, both `hf`. Prints the gap of the same weights (on the probe
prompts, and on generated samples against the trainer), the gap to weights one optimiser step older for each `--lr`, how
many of the model's tensors the probe misses when each is negated in turn, and the milliseconds of each check. The
limits of docs/mismatch.md follow from it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fsm_trainer.config.resolve import MAX_LOGPROB_GAP
from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.base import RolloutRequest, SamplingParams, Scores
from fsm_trainer.engines.hf_model import load_tokenizer
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.logprob_gap import GapLimit, LogprobGap
from fsm_trainer.trainers.mismatch import RESCORED_SAMPLES, RESCORED_TOKENS

PROMPTS = tuple(f"{1000 + 547 * i}=" for i in range(16))
"""The quickstart's shapes, with 16 samples of 5 tokens each."""
PROBE = 4
"""Prompts of the probe: the default of --sync-probe-prompts."""


class Bench:
    """Both engines with version 0, and a batch that it generated."""

    def __init__(self, args: argparse.Namespace, lr: float) -> None:
        """Start everything."""
        tokenizer = load_tokenizer(args.ckpt)
        self.prompts = tuple(tuple(tokenizer.encode(text)) for text in args.prompt)
        self.probe = self.prompts[:PROBE]
        sampling = SamplingParams(n_samples=args.samples, max_new_tokens=args.tokens)
        self.trainer = HFTrainEngine(args.ckpt, lr=lr, dtype=args.dtype)
        self.rollout = HFRolloutEngine(args.ckpt, sampling, dtype=args.dtype)
        for engine in (self.trainer, self.rollout):
            engine.start()
        self.rollout.load_weights(self.trainer.export(0))
        self.batch = self.rollout.generate(RolloutRequest(0, self.prompts, 0))

    def close(self) -> None:
        """Free both."""
        self.rollout.close()
        self.trainer.close()

    def sequences(self) -> list[TrainSequence]:
        """The batch with advantages 1 and -1 in turn."""
        return [
            TrainSequence(
                (*prompt, *s.tokens),
                (*(0.0,) * len(prompt), *s.logprobs),
                len(prompt),
                (*(0,) * len(prompt), *(1,) * len(s.tokens)),
                1.0 if i % 2 else -1.0,
                0.0,
            )
            for prompt, group in zip(self.prompts, self.batch.groups, strict=True)
            for i, s in enumerate(group)
        ]

    def gap(self) -> LogprobGap:
        """The batch's recorded logprobs against the trainer's present ones."""
        rows = [(prompt, s) for prompt, group in zip(self.prompts, self.batch.groups, strict=True) for s in group]
        scores = self.trainer.score([(*prompt, *s.tokens) for prompt, s in rows], 1.0)
        own = [values[len(prompt) - 1 :] for (prompt, _), values in zip(rows, scores, strict=True)]
        return LogprobGap.between(own, [s.logprobs for _, s in rows])


def missed(bench: Bench, limit: GapLimit) -> tuple[list[str], int]:
    """Tensors of the rollout engine whose negation leaves the probe within the limit, and how many there are."""
    expected: Scores = bench.trainer.score(bench.probe, 1.0)
    model = bench.rollout._ready_model()
    names: list[str] = []
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.neg_()
        if limit.admits(LogprobGap.between(expected, bench.rollout.score(bench.probe, 1.0))):
            names.append(name)
        parameter.neg_()
    return names, len(parameters)


def ms(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def costs(bench: Bench, repeats: int) -> list[tuple[str, float]]:
    """Milliseconds of each check, and of what it is added to."""
    samples = [(*p, *g[0].tokens[:RESCORED_TOKENS]) for p, g in zip(bench.prompts, bench.batch.groups, strict=True)]
    request, sequences = RolloutRequest(0, bench.prompts, 0), bench.sequences()
    return [
        ("probe, trainer (each export)", ms(lambda: bench.trainer.score(bench.probe, 1.0), repeats)),
        ("probe, engine (each load)", ms(lambda: bench.rollout.score(bench.probe, 1.0), repeats)),
        ("rescoring (each batch)", ms(lambda: bench.rollout.score(samples[:RESCORED_SAMPLES], 1.0), repeats)),
        ("export + load", ms(lambda: bench.rollout.load_weights(bench.trainer.export(0)), repeats)),
        ("generation", ms(lambda: bench.rollout.generate(request), repeats)),
        ("train step", ms(lambda: bench.trainer.train(sequences), repeats)),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True, help="model folder")
    parser.add_argument("--dtype", default="float32", choices=sorted(MAX_LOGPROB_GAP))
    parser.add_argument("--lr", type=float, nargs="*", default=[1e-6], help="for the step that one engine lacks")
    parser.add_argument("--prompt", nargs="*", default=PROMPTS, help="prompts, of which the first 4 are the probe")
    parser.add_argument("--samples", type=int, default=16, help="completions of each (default: 16)")
    parser.add_argument("--tokens", type=int, default=5, help="longest completion (default: 5)")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls (default: 20)")
    parser.add_argument("--skip-tensors", action="store_true", help="negate none: that takes a pass for each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    limit = GapLimit(MAX_LOGPROB_GAP[args.dtype])
    print(f"{args.ckpt}, {args.dtype}; the default limit is {limit}")
    for index, lr in enumerate(args.lr):
        bench = Bench(args, lr)
        if index == 0:
            probe = LogprobGap.between(bench.trainer.score(bench.probe, 1.0), bench.rollout.score(bench.probe, 1.0))
            print(f"same weights, probe      {probe}")
            print(f"same weights, samples    {bench.gap()}")
            if not args.skip_tensors:
                names, count = missed(bench, limit)
                print(f"negated tensors missed   {len(names)} of {count}: {', '.join(names[:6])}")
            for name, value in costs(bench, args.repeats):
                print(f"{name:<30} {value:.2f} ms")
            bench.close()
            bench = Bench(args, lr)
        bench.trainer.train(bench.sequences())
        print(f"a step at lr {lr:g} behind   {bench.gap()}")
        bench.close()


if __name__ == "__main__":
    main()
