"""`fsm-train --simulate`: what it predicts, what it needs and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsm_trainer.cli.flags import parse
from fsm_trainer.cli.simulate import run_simulation, starvation
from fsm_trainer.cli.simulate_flags import FLAGS
from fsm_trainer.cli.train import main
from fsm_trainer.config import ConfigError
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.simulate.shares import Shares
from fsm_trainer.simulate.simulator import simulate

ROOT = Path(__file__).parents[2]


def predict(line: str) -> dict[str, str]:
    """The prediction's rows by name; what follows without a name belongs to the last."""
    invocation = parse(["--simulate", *line.split()])
    assert invocation.simulation is not None
    rows: dict[str, str] = {}
    name = ""
    for text in run_simulation(invocation.config, invocation.simulation).splitlines():
        name = text[:12].strip() or name
        rows[name] = f"{rows[name]}\n{text[12:]}" if name in rows else text[12:]
    return rows


def test_one_worker_is_bound_by_the_slower_side() -> None:
    rows = predict("--algo async-grpo --max-steps 100 --simulate-rollout-s 1 --simulate-train-s 0.5")
    # 100 rollouts one after the other, then the last step.
    assert rows["wall time"] == "100.5 s, 1.005 s a step"
    assert rows["batches"] == "100 admitted, 100 trained"
    assert rows["drops"] == "none"
    assert rows["staleness"] == "mean 0.99, 1 at 0, 99 at 1"
    assert "The trainer waits 50 % of the time, for generation." in rows["idle"]


def test_a_synchronous_algorithm_takes_the_sum() -> None:
    rows = predict("--algo grpo --max-steps 10 --simulate-rollout-s 1 --simulate-train-s 0.5 --simulate-reward-s 0.25")
    assert rows["wall time"] == "17.5 s, 1.750 s a step"
    assert "by design" not in rows["idle"]
    assert "Each side waits for the other" in rows["idle"]
    assert "speed-up" not in rows


def test_the_speed_up_compares_with_one_step_after_the_other() -> None:
    rows = predict("--algo async-grpo --max-steps 400 --simulate-rollout-s 1 --simulate-train-s 1")
    assert rows["speed-up"].startswith("2.00x over one step after the other (2.000 s a step)")


def test_a_balanced_run_starves_nobody() -> None:
    rows = predict("--algo async-grpo --max-steps 200 --simulate-rollout-s 1 --simulate-train-s 0.95")
    assert "Neither side starves" in rows["idle"]


def test_greedy_shows_what_it_throws_away() -> None:
    rows = predict(
        "--algo async-grpo --async-admission greedy --async-rollout-workers 4 --max-steps 50 --seed 3 "
        "--simulate-rollout-s pareto:0.5,1.2"
    )
    trained, dropped = (int(n) for n in re.findall(r"(\d+) (?:trained|dropped)", rows["batches"]))
    assert trained == 50
    assert rows["drops"] == f"{dropped} stale"
    assert dropped > 0


def test_a_long_run_is_simulated_in_part() -> None:
    rows = predict("--algo async-grpo --max-steps 5000 --simulate-rollout-s 1 --simulate-train-s 0.5")
    assert rows["simulated"].startswith("500 of 5000 steps")
    assert rows["wall time"] == "5005.0 s for all 5000 steps, 1.001 s a step"


def test_in_flight_sync_is_simulated() -> None:
    """Two workers on one engine, 2 s a batch: drained, they wait for each other at each sync."""
    line = (
        "--algo async-grpo --rollout-engine vllm --async-sync-mode {} --async-rollout-workers 2 "
        "--async-max-staleness 2 --max-steps 200 --simulate-rollout-s 2"
    )
    drained, flying = predict(line.format("drain")), predict(line.format("inflight"))
    assert ", sync every step, in flight, seed" in flying["simulated"] and "flight" not in drained["simulated"]
    assert flying["wall time"] == "201.0 s, 1.005 s a step"
    assert drained["wall time"] == "267.0 s, 1.335 s a step"


def test_durations_of_a_recorded_run(tmp_path: Path) -> None:
    config = SchedulerConfig(max_steps=40)
    simulate(config, durations=None).write(tmp_path)
    rows = predict(f"--algo async-grpo --simulate-from {tmp_path}")
    assert rows["wall time"] == "40.5 s, 1.012 s a step"
    rows = predict(f"--algo async-grpo --simulate-from {tmp_path} --simulate-train-s 2")
    # The first rollout, then training without a gap.
    assert rows["wall time"] == "81.0 s, 2.025 s a step"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--simulate-rollout-s 1", "no meaning without --simulate"),
        ("--simulate-from runs/x", "no meaning without --simulate"),
        ("--simulate --simulate-train-s soon", "--simulate-train-s: 'soon' is no duration"),
        ("--simulate --simulate-train-s normal:1,2", "names no distribution"),
        ("--simulate --simulate-train-s lognormal:1", "expected lognormal:median,sigma"),
        ("--simulate --simulate-train-s -1", "at least 0"),
        ("--simulate --simulate-train-s 1e300", "at most 1e+09"),
        ("--simulate --simulate-train-s lognormal:1,1000", "sigma 1000, expected at most 50"),
        ("--simulate --simulate-train-s pareto:1,0.001", "alpha 0.001, expected at least 0.1"),
        ("--simulate --simulate-train-s uniform:2,1", "low above its high"),
        ("--simulate --simulate-from nowhere", "nowhere does not exist"),
    ],
)
def test_refusals(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_each_duration_has_its_flag() -> None:
    given = [word for name in FLAGS for word in (f"--{name.replace('_', '-')}", "0.5")]
    request = parse(["--simulate", *given]).simulation
    assert request is not None
    assert request.given == dict.fromkeys(FLAGS, "0.5")


def test_a_setting_is_still_checked() -> None:
    with pytest.raises(ConfigError, match="--async-queue-size"):
        parse(["--simulate", "--algo", "async-grpo", "--async-queue-size", "0"])


def test_waits_are_told_by_cause() -> None:
    shares = Shares(
        window_s=10.0,
        rollout_idle=0.05,
        trainer_idle=0.41,
        rollout_waits={"queue_full": 0.05},
        trainer_waits={"generation": 0.31, "weight_sync": 0.10, "stopping": 0.2},
        trainer_states={},
    )
    assert starvation(shares) == [
        "The trainer waits 41 % of the time: 31 % for generation, 10 % for engines to load new weights."
    ]


def test_it_loads_nothing_heavy_and_needs_no_files() -> None:
    code = (
        "import sys\n"
        "from fsm_trainer.cli.train import main\n"
        "assert main(['--algo', 'async-grpo', '--simulate', '--max-steps', '5']) == 0\n"
        "print([n for n in ('torch', 'transformers', 'pandas', 'datasets', 'pyarrow') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
