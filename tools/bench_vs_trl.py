"""Time, memory and learning of a training step against TRL's GRPOTrainer, on one model, task and machine.

    python tools/bench_vs_trl.py [--repeats 3] [--steps 100]

Needs TRL in its own environment, which `make test-trl` makes. Each repeat runs TRL, then `grpo`, then `async-grpo`,
on the quickstart's model and task with the same shapes, optimiser and one torch thread, without the entropy bonus that
TRL lacks. Prints medians of ms a step, the peak of resident memory (of all processes of a run together) and the reward
curves. docs/performance.md shows its output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fsm_trainer.presets import preset_settings
from fsm_trainer.presets.quickstart import write_files

ROOT = Path(__file__).parents[1]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
WARM_UP_STEPS = 10
"""Left out of the times: first calls are slower, and the pipeline has to fill."""
KINDS = {
    "grpo, inline": {"algo": "grpo", "rollout_host": "inline"},
    "grpo": {"algo": "grpo"},
    "async-grpo": {"algo": "async-grpo"},
}
"""What is run besides TRL: inline, the rollout engine lives in the trainer's process, as TRL's does."""
AIMS = {"grpo, inline": 1.5, "grpo": 1.5, "async-grpo": 2.2}
"""How many times faster than TRL a step is meant to be."""


@dataclass(frozen=True)
class Measured:
    """One run."""

    step_ms: float
    peak_mb: float
    reward: list[float]
    """Mean reward of each step."""


class PeakMemory:
    """Peak of the summed resident memory of a process and its children, in MB, from samples 50 ms apart.

    Pages that processes share are counted in proportion (PSS).
    """

    def __init__(self, pid: int) -> None:
        """Start watching."""
        self._process = psutil.Process(pid)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_mb = 0.0
        self._thread.start()

    def stop(self) -> float:
        """End watching; the peak."""
        self._done.set()
        self._thread.join()
        return self.peak_mb

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            try:
                family = [self._process, *self._process.children(recursive=True)]
                total = sum(_resident_mb(process) for process in family)
            except psutil.Error:
                continue
            self.peak_mb = max(self.peak_mb, total)


def _resident_mb(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss) / 2**20
    except psutil.Error:
        return 0.0


def run_watched(command: list[str], folder: Path) -> tuple[str, float]:
    """Run a command to its end; its standard output and peak memory. Exits if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "stderr.txt").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT)
        memory = PeakMemory(process.pid)
        output, _ = process.communicate()
        peak_mb = memory.stop()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{(folder / 'stderr.txt').read_text()[-2000:]}")
    return output, peak_mb


def measure_trl(settings: dict[str, Any], files: dict[str, str], folder: Path) -> Measured:
    """Train with TRL."""
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [str(TRL_PYTHON), str(ROOT / "tools" / "trl_grpo.py"), files["ckpt"], files["dataset_path"]]
    output, peak_mb = run_watched([*command, str(folder / "settings.json")], folder)
    found = json.loads(output.splitlines()[-1])
    return Measured(1e3 * statistics.mean(found["step_s"][WARM_UP_STEPS:]), peak_mb, found["reward"])


def measure_ours(kind: str, settings: dict[str, Any], files: dict[str, str], folder: Path) -> Measured:
    """Train with fsm_trainer."""
    folder.mkdir()
    given = {**settings, **files, **KINDS[kind], "output_dir": str(folder / "run")}
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "fsm_trainer.cli.train", *flags]
    _, peak_mb = run_watched([*command, "--progress", "none", "--log-level", "error"], folder)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    span_s = lines[-1]["time_s"] - lines[WARM_UP_STEPS - 1]["time_s"]
    step_ms = 1e3 * span_s / (len(lines) - WARM_UP_STEPS)
    return Measured(step_ms, peak_mb, [line["reward_mean"] for line in lines])


def bench_settings(steps: int, seed: int) -> dict[str, Any]:
    """The quickstart's settings at a constant rate and without entropy bonus, so that TRL can have the same."""
    settings = {**preset_settings("quickstart"), "max_steps": steps, "seed": seed, "lr_decay_style": "constant"}
    settings.update(entropy_coef=0.0, lr=1e-3, save_interval=0, log_samples="none")
    for name in ("algo", "lr_decay_steps", "min_lr"):
        del settings[name]
    return settings


def report(runs: dict[str, list[Measured]], steps: int) -> None:
    """Print times and memory with their ratios to TRL (pair by pair), then the reward curves."""
    print(f"{'':<14}{'ms a step':>10}{'vs TRL':>9}{'aim':>7}{'peak MB':>9}{'vs TRL':>8}")
    for name, measured in runs.items():
        pairs = list(zip(measured, runs["TRL"], strict=True))
        speed_up = statistics.median(trl.step_ms / ours.step_ms for ours, trl in pairs)
        memory = statistics.median(ours.peak_mb / trl.peak_mb for ours, trl in pairs)
        step_ms, peak = (statistics.median(getattr(run, key) for run in measured) for key in ("step_ms", "peak_mb"))
        aim = f"{AIMS[name]}x" if name in AIMS else ""
        print(f"{name:<14}{step_ms:>10.1f}{speed_up:>8.2f}x{aim:>7}{peak:>9.0f}{memory:>7.2f}x")
    window = max(1, steps // 10)
    print(f"\nmean reward over {window} steps, mean of the repeats\n{'up to step':<14}", end="")
    print("".join(f"{end:>8}" for end in range(window, steps + 1, window)))
    for name, measured in runs.items():
        curve = [statistics.mean(r for run in measured for r in run.reward[end - window : end])
                 for end in range(window, steps + 1, window)]  # fmt: skip
        print(f"{name:<14}" + "".join(f"{value:>8.3f}" for value in curve))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps a run (default: 100)")
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS + 1:
        parser.error(f"--steps is {args.steps}, expected more than {WARM_UP_STEPS + 1}")
    if not TRL_PYTHON.exists():
        parser.error(f"{TRL_PYTHON} is not there; `make test-trl` makes TRL's environment")
    runs: dict[str, list[Measured]] = {name: [] for name in ("TRL", *KINDS)}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for i in range(args.repeats):
            files = write_files(root / f"files-{i}", seed=i)
            settings = bench_settings(args.steps, i)
            runs["TRL"].append(measure_trl(settings, files, root / f"trl-{i}"))
            for number, kind in enumerate(KINDS):
                runs[kind].append(measure_ours(kind, settings, files, root / f"ours-{i}-{number}"))
    report(runs, args.steps)


if __name__ == "__main__":
    main()
