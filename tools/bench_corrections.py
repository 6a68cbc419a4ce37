"""What staleness costs, and what each off-policy correction gives back: reward after a fixed number of samples.

    python tools/bench_corrections.py [--task sort] [--seeds 5] [--steps 200] [--jobs 2] [--out docs/off-policy]

Trains the tiny model with the real engines at a fixed staleness: step t learns from completions of the weights after
t - staleness steps, as `--async-admission lockstep` has it once the pipeline is full, but in one process without a
scheduler, so that a run takes seconds. Prints a table: mean and spread (standard deviation over the seeds) of the
reward over the last tenth of the steps. With --out the numbers are kept as JSON, so that a later call only runs what
is missing, and plotted. docs/off-policy.md shows its output.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from fsm_trainer.algorithms.materialize import materialize
from fsm_trainer.algorithms.objective import CORRECTIONS, Objective
from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.engines.base import RolloutRequest, SamplingParams, Snapshot
from fsm_trainer.engines.hf_model import load_tokenizer
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.tiny import build_tiny_checkpoint

STALENESS = (0, 1, 2, 4, 8)
DIGITS, PROMPTS, SAMPLES = 4, 8, 16


@dataclass(frozen=True)
class Case:
    """One run."""

    task: str
    correction: str
    staleness: int
    seed: int
    steps: int
    lr: float


def answer(task: str, digits: str) -> str:
    """What the completion should be: the digits themselves, or in order."""
    return digits if task == "copy" else "".join(sorted(digits))


def reward(completion: str, right: str) -> float:
    """The share of positions that match, over the longer of the two texts."""
    return sum(map(str.__eq__, completion, right)) / max(len(completion), len(right))


class World:
    """One run's engines, and the weights of the last `staleness` versions."""

    def __init__(self, case: Case, ckpt: str) -> None:
        """Start both engines on the same fresh model."""
        self._case = case
        self._tokenizer = load_tokenizer(ckpt)
        self._draw = random.Random(case.seed)
        self._rollout = HFRolloutEngine(ckpt, SamplingParams(n_samples=SAMPLES, max_new_tokens=DIGITS + 1))
        self._train = HFTrainEngine(
            ckpt,
            objective=objective(case.correction),
            lr=case.lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            seed=case.seed,
        )
        self._rollout.start()
        self._train.start()
        self._kept: deque[Snapshot] = deque([self._train.export(0)])

    def step(self, number: int) -> float:
        """Generate with the weights of `staleness` steps ago, score, take an optimiser step; the mean reward."""
        self._rollout.load_weights(self._kept[0])
        texts = ["".join(self._draw.choices("0123456789", k=DIGITS)) for _ in range(PROMPTS)]
        prompts = tuple(tuple(self._tokenizer.encode(f"{text}=")) for text in texts)
        rollout = self._rollout.generate(RolloutRequest(number, prompts, self._case.seed))
        rewards = [
            [reward(self._decode(sample.tokens), answer(self._case.task, text)) for sample in group]
            for text, group in zip(texts, rollout.groups, strict=True)
        ]
        groups = [[(sample.tokens, sample.logprobs) for sample in group] for group in rollout.groups]
        sequences, _ = materialize(prompts, groups, rewards, advantage=get_algorithm("grpo").advantage)
        version = self._train.train(sequences).train_version
        self._keep(version)
        return statistics.mean(value for group in rewards for value in group)

    def close(self) -> None:
        """Free everything."""
        self._rollout.close()
        self._train.close()

    def _keep(self, version: int) -> None:
        if version == self._kept[-1].version:
            return
        self._kept.append(self._train.export(version))
        if len(self._kept) > self._case.staleness + 1:
            self._train.release(self._kept.popleft().version)

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def objective(correction: str) -> Objective:
    """GRPO's objective with a correction at its own defaults."""
    return Objective(correction=correction, entropy_coef=0.01)


def run(case: Case) -> float:
    """Train; mean reward over the last tenth of the steps."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(case, str(build_tiny_checkpoint(Path(folder) / "model", seed=case.seed)))
        try:
            rewards = [world.step(number) for number in range(case.steps)]
        finally:
            world.close()
    return statistics.mean(rewards[-max(1, case.steps // 10) :])


def cases_of(args: argparse.Namespace, correction: str, staleness: int) -> list[Case]:
    """One cell of the table, a case a seed. Every correction leaves fresh batches as they are: those are run once."""
    name = correction if staleness else "none"
    return [Case(args.task, name, staleness, seed, args.steps, args.lr) for seed in range(args.seeds)]


def all_cases(args: argparse.Namespace) -> list[Case]:
    """Every combination that was asked for, each once."""
    cells = [cases_of(args, correction, staleness) for correction in args.corrections for staleness in args.staleness]
    return list(dict.fromkeys(case for cell in cells for case in cell))


def table(rewards: dict[Case, float], args: argparse.Namespace) -> str:
    """Mean and spread over the seeds, a line a correction, as a table of markdown."""
    head = "| correction | " + " | ".join(f"staleness {staleness}" for staleness in args.staleness) + " |"
    lines = [head, "|---" * (1 + len(args.staleness)) + "|"]
    for correction in args.corrections:
        cells = []
        for staleness in args.staleness:
            found = [rewards[case] for case in cases_of(args, correction, staleness)]
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            cells.append(f"{statistics.mean(found):.3f} ± {spread:.3f}")
        lines.append(f"| `{correction}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_plot(rewards: dict[Case, float], args: argparse.Namespace, path: Path) -> None:
    """Reward against staleness, a line a correction, with the spread as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for offset, correction in enumerate(args.corrections):
        found = [[rewards[case] for case in cases_of(args, correction, staleness)] for staleness in args.staleness]
        places = [index + 0.06 * (offset - len(args.corrections) / 2) for index in range(len(args.staleness))]
        spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in found]
        axes.errorbar(places, [statistics.mean(values) for values in found], spread, capsize=2, label=correction)
    axes.set_xticks(range(len(args.staleness)), [str(s) for s in args.staleness])
    axes.set_xlabel("staleness (optimiser steps)")
    axes.set_ylabel(f"mean reward, last tenth of {args.steps} steps")
    axes.set_title(f"{args.task} task, {args.seeds} seeds, mean and standard deviation")
    axes.legend(fontsize="small")
    figure.savefig(path)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task", choices=("sort", "copy"), default="sort", help="what the model learns (default: sort)"
    )
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    parser.add_argument("--staleness", nargs="+", type=int, default=list(STALENESS))
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (default: 5)")
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps a run (default: 200)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument(
        "--out", type=Path, metavar="STEM", help="keep STEM-TASK.json, go on from it, plot STEM-TASK.svg"
    )
    return parser.parse_args()


def load(path: Path | None) -> dict[Case, float]:
    """What an earlier call has measured."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {Case(**{name: row[name] for name in Case.__dataclass_fields__}): row["reward"] for row in found}


def main() -> None:
    """Run what is not there yet, print the table, write what was asked for."""
    args = parse_args()
    path = None if args.out is None else Path(f"{args.out}-{args.task}.json")
    known = load(path)
    cases = all_cases(args)
    missing = [case for case in cases if case not in known]
    with ProcessPoolExecutor(args.jobs) as pool:
        for case, value in zip(missing, pool.map(run, missing), strict=True):
            known[case] = value
            print(f"{case.correction} staleness {case.staleness} seed {case.seed}: {value:.3f}", flush=True)
            if path is not None:
                rows = [{**asdict(case), "reward": value} for case, value in known.items()]
                path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    rewards = {case: known[case] for case in cases}
    samples = args.steps * PROMPTS * SAMPLES
    print(f"\n{args.task}, {samples} samples in {args.steps} steps, lr {args.lr:g}, {args.seeds} seeds\n")
    print(table(rewards, args))
    if path is not None:
        write_plot(rewards, args, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
