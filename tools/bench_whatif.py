"""How far off `fsm-replay whatif` is: pairs of settings that are both really run, one predicted from the other's log.

    python tools/bench_whatif.py [--only fake|tiny] [--steps 120] [--repeats 2] [--keep FOLDER] [--docs]

Half of the pairs run with fake engines in real time: real threads, loop, log and rewards, and operations that sleep.
The other half run the quickstart's recipe: a model, an engine process and a trainer that share this machine's cores.
The time compared is that from the first weights served to the end of the run; start-up, which both runs have,
would make every error look smaller. Each setting runs `repeats` times, in turn; the error is that of the mean. It
prints the table in docs/what-if.md, and with --docs writes it there, in about seven minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from fsm_trainer import TrainConfig
from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.data.prompts import PromptSource
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.engines.fake import FakeBehaviour, FakeRolloutEngine, FakeTrainEngine
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.presets import preset_settings
from fsm_trainer.runtime.clock import MonotonicClock
from fsm_trainer.runtime.host import InlineHost
from fsm_trainer.runtime.inbox import ThreadInbox
from fsm_trainer.runtime.lanes import Lanes
from fsm_trainer.runtime.loop import EventLoop
from fsm_trainer.simulate.recorded import recorded
from fsm_trainer.simulate.settings import FLAGS, Setting
from fsm_trainer.simulate.whatif import whatif
from fsm_trainer.trainers import build_trainer
from fsm_trainer.trainers.prepare import prepare
from fsm_trainer.trainers.rollout_operations import RolloutOperations
from fsm_trainer.trainers.run_directory import RunDirectory
from fsm_trainer.trainers.scoring import Scorer

C = CommandKind
PAGE = Path(__file__).parents[1] / "docs" / "what-if.md"
MARK, END = "<!-- table: made by `python tools/bench_whatif.py --docs` -->", "<!-- end of table -->"
SYNC = Setting(queue_size=1, max_staleness=0)
USUAL = Setting()
WIDE = Setting(max_staleness=4, workers=3, engines=3, queue_size=2)
SHARED = Setting(max_staleness=3, workers=2, engines=1)
RARE = Setting(max_staleness=2, workers=2, engines=2, sync_interval=2)
GREEDY = Setting("greedy", max_staleness=1, workers=2, engines=2)
LOCKSTEP = Setting("lockstep", max_staleness=2, sync_interval=2)
AHEAD = Setting(max_staleness=2, sync_interval=2)
FAKE = [(SYNC, USUAL), (USUAL, SYNC), (USUAL, WIDE), (WIDE, SHARED), (SHARED, RARE), (RARE, GREEDY)]
TINY = [(SYNC, USUAL), (USUAL, SYNC), (USUAL, AHEAD), (AHEAD, LOCKSTEP), (LOCKSTEP, SHARED), (SHARED, USUAL)]
"""Recorded setting, asked setting."""


ROWS = [{"prompt": str(number)} for number in range(16)]


class Tokenizer:
    """As much of a tokenizer as prompts and rewards need: a token is a character's number."""

    eos_token_id = 0
    bos_token_id = None
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Its characters' numbers."""
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The numbers in words."""
        return " ".join(str(token) for token in tokens if token or not skip_special_tokens)


def run_fake(setting: Setting, steps: int, seed: int, folder: Path) -> None:
    """One run with engines that sleep, behind everything else that a live run has."""
    config = setting.config(SchedulerConfig(max_steps=steps))
    behaviour, clock = _behaviour(steps), MonotonicClock()
    inbox = ThreadInbox(clock)
    run = {"seed": seed, "rollout_host": "inline"}
    folder.mkdir()
    log = EventLogWriter(folder / LOG_NAME, metadata=log_metadata(config, run))
    operations = RolloutOperations(
        source=PromptSource(ROWS, Tokenizer(), batch_size=2, epochs=1000, seed=0, max_prompt_tokens=8),
        scorer=Scorer(Tokenizer(), _reward, get_algorithm("async-grpo")),
        train_engine=FakeTrainEngine(behaviour),
        make_host=lambda engine: InlineHost(lambda: FakeRolloutEngine(behaviour, engine=engine), f"engine-{engine}"),
        run=RunDirectory(folder, folder / "checkpoints"),
        seed=seed,
        clock=clock,
        post=inbox.put,
        always_steps=True,
    )
    lanes = Lanes(operations, inbox.put, clock)
    outcome = EventLoop(Scheduler(config), log, inbox, lanes.dispatch, clock, [operations]).run()
    lanes.close(10.0)
    operations.close(10.0)
    log.close()
    if outcome != "completed":
        raise SystemExit(f"the run of {setting} {outcome}")


def _behaviour(steps: int) -> FakeBehaviour:
    """Rollouts of 60 ms with a tail, the same for a batch on whichever engine; steps of 50 ms; some syncing."""
    draw = random.Random(7)
    return FakeBehaviour(
        {
            C.START_TRAINER: 0.1,
            C.START_ENGINE: 0.1,
            C.GENERATE: [0.06 * draw.lognormvariate(0.0, 0.5) for _ in range(4 * steps)],
            C.TRAIN: [0.05 * draw.uniform(0.9, 1.1) for _ in range(steps)],
            C.EXPORT: 0.003,
            C.LOAD_WEIGHTS: 0.008,
            C.SAVE: 0.02,
        }
    )


def _reward(record: RewardRecord) -> float:
    if record.metadata["sample"] == 0:
        time.sleep(0.004)
    return float(record.metadata["sample"])


def run_tiny(setting: Setting, steps: int, seed: int, folder: Path) -> None:
    """One run of the quickstart's recipe."""
    settings: dict[str, Any] = {**preset_settings("quickstart"), "preset": "quickstart", "seed": seed}
    settings.update(max_steps=steps, output_dir=str(folder), log_samples="none", progress="none", save_interval=0)
    settings.update({"algo": "grpo"} if setting == SYNC else _async_settings(setting))
    result = build_trainer(prepare(TrainConfig.build(settings))).fit()
    if result.outcome != "completed":
        raise SystemExit(f"the run of {setting} {result.message}")


def _async_settings(setting: Setting) -> dict[str, Any]:
    values = asdict(setting)
    return {
        flag.removeprefix("--").replace("-", "_"): values[name] for name, flag in FLAGS.items() if name != "engines"
    }


RUNS = {"fake": (FAKE, run_fake), "tiny": (TINY, run_tiny)}


def measure(world: str, steps: int, repeats: int, root: Path) -> list[tuple[str, str, float, float, float]]:
    """World and pair in words, predicted and actual seconds of each pair, and the spread of the actual ones."""
    pairs, run = RUNS[world]
    settings = list(dict.fromkeys(setting for pair in pairs for setting in pair))
    folders: dict[Setting, list[Path]] = {setting: [] for setting in settings}
    # What this process does for the first time takes longer.
    run(USUAL, 12, 0, root / f"{world}-warm-up")
    for repeat in range(repeats):
        for number, setting in enumerate(settings):
            folder = root / f"{world}-{number}-{repeat}"
            run(setting, steps, repeat, folder)
            folders[setting].append(folder)
    rows = []
    for before, after in pairs:
        actual = [_served_to_end(folder) for folder in folders[after]]
        predicted = [_predict(folder, after) for folder in folders[before]]
        spread = (max(actual) - min(actual)) / statistics.mean(actual)
        pair = f"{_words(before)} -> {_words(after)}"
        rows.append((world, pair, statistics.mean(predicted), statistics.mean(actual), spread))
    return rows


def _served_to_end(folder: Path) -> float:
    timing = recorded(folder).timing
    assert timing.end_s is not None
    return timing.end_s - timing.served_s


def _predict(folder: Path, setting: Setting) -> float:
    (found,) = whatif(folder, {name: [value] for name, value in asdict(setting).items()}).predictions
    if found.wall_s is None or found.served_s is None:
        raise SystemExit(f"{setting}: {found.problem}")
    return found.wall_s - found.served_s


def _words(s: Setting) -> str:
    if s == SYNC:
        return "synchronous"
    return f"{s.admission} q{s.queue_size} s{s.max_staleness} w{s.workers} e{s.engines} i{s.sync_interval}"


def table(rows: Iterable[tuple[str, str, float, float, float]]) -> str:
    """The table in Markdown, and its median and worst."""
    lines = [
        "| engines | recorded -> asked | predicted s | actual s | error | repeats differ by |",
        "|---|---|---|---|---|---|",
    ]
    errors = []
    for world, pair, predicted, actual, spread in rows:
        errors.append(predicted / actual - 1.0)
        differ = f"{spread:.1%}" if spread else "-"
        lines.append(f"| {world} | {pair} | {predicted:.2f} | {actual:.2f} | {errors[-1]:+.1%} | {differ} |")
    sizes = [abs(error) for error in errors]
    worst = f"Median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}, of {len(sizes)} pairs."
    return "\n".join([*lines, "", worst]) + "\n"


def with_table(page: str, made: str) -> str:
    """The page with a new table between its marks."""
    head, mark, rest = page.partition(MARK)
    _, end, tail = rest.partition(END)
    assert mark and end, f"{PAGE} has lost its marks"
    return f"{head}{mark}\n{made}{end}{tail}"


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(RUNS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="leave the runs in this new folder")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE.name}")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    worlds = [args.only] if args.only else list(RUNS)
    with tempfile.TemporaryDirectory(prefix="fsm-whatif-") as folder:
        root = args.keep or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        made = table([row for world in worlds for row in measure(world, args.steps, args.repeats, root)])
    print(made, end="")
    if args.docs:
        PAGE.write_text(with_table(PAGE.read_text(), made))


if __name__ == "__main__":
    main()
