"""The command line of fsm-train: flags, file, preset, help, dry run, exit codes."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsm_trainer.cli import train
from fsm_trainer.cli.flags import build_parser, parse
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.groups import GROUPS
from fsm_trainer.trainers.prepare import Prepared

SEED_COMMAND = (
    "--algo async-grpo --ckpt Qwen/Qwen3-0.6B --dataset-path gsm8k:main "
    "--dataset-loader-fn examples/math/dataset_loader.py --reward-fn-path examples/math/math_verify_reward.py "
    "--train-devices 0,1 --tp-size 2 --rollout-devices 2,3 --rollout-tp-size 1 --batch-size 2 --n-samples 8 "
    "--max-new-tokens 512 --async-queue-size 2 --async-max-staleness 1"
)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_seed_command() -> None:
    config = parse(SEED_COMMAND.split()).config
    given = {
        "algo": "async-grpo",
        "ckpt": "Qwen/Qwen3-0.6B",
        "dataset_path": "gsm8k:main",
        "dataset_loader_fn": "examples/math/dataset_loader.py",
        "reward_fn_path": "examples/math/math_verify_reward.py",
        "train_devices": "0,1",
        "tp_size": 2,
        "rollout_devices": "2,3",
        "rollout_tp_size": 1,
        "batch_size": 2,
        "n_samples": 8,
        "max_new_tokens": 512,
        "async_queue_size": 2,
        "async_max_staleness": 1,
    }
    assert config == TrainConfig(**given)
    assert config.rollout_groups == (("cuda:2",), ("cuda:3",))
    scheduler = config.to_scheduler_config()
    assert (scheduler.engines, scheduler.workers, scheduler.queue_size, scheduler.max_staleness) == (2, 2, 2, 1)


def test_rollout_tp_size_defaults_to_the_training_one() -> None:
    config = parse(["--tp-size", "2", "--rollout-devices", "0..3"]).config
    assert config.rollout_groups == (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", True),
        ("--async-drop-stale-batches", True),
        ("--async-drop-stale-batches true", True),
        ("--async-drop-stale-batches false", False),
        ("--async-drop-stale-batches=false", False),
        ("--no-async-drop-stale-batches", False),
        ("--async-drop-stale-batches --lr 1", True),
    ],
)
def test_spellings_of_a_switch(flags: str, expected: bool) -> None:
    assert parse(flags.split()).config.async_drop_stale_batches is expected


def test_alias_and_negative_number() -> None:
    config = parse(["--train-tp-size", "2", "--top-k", "-1"]).config
    assert (config.tp_size, config.top_k) == (2, -1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bath-size", "3"], "unknown flag --bath-size; did you mean --batch-size?"),
        (["--zzz"], "unknown flag --zzz; see fsm-train --help"),
        (["--batch"], "unknown flag --batch; did you mean --batch-size?"),
        (["train.jsonl"], "unexpected argument 'train.jsonl'; every setting is a flag, see fsm-train --help"),
        (["--lr"], "--lr: expected one argument"),
        (["--rollout-engine", "fake"], "--rollout-engine is fake, expected one of auto, hf, vllm"),
        (["--preset", "nothing"], "--preset is nothing, expected one of quickstart"),
    ],
)
def test_refusals(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(argv) == 2
    assert capsys.readouterr().err == f"fsm-train: error: {message}\n"


def test_flags_win_over_the_file_and_the_file_over_the_preset() -> None:
    Path("run.yaml").write_text("preset: quickstart\nbatch-size: 7\nlr: 0.5\n")
    invocation = parse(["--config", "run.yaml", "--lr", "0.25"])
    config = invocation.config
    assert (config.lr, config.batch_size, config.max_new_tokens, config.weight_decay) == (0.25, 7, 5, 0.0)
    assert invocation.origin["batch_size"] == "run.yaml"
    assert invocation.origin["max_new_tokens"] == "the preset quickstart"
    assert "lr" not in invocation.origin


def test_file_error_names_the_file() -> None:
    Path("run.yaml").write_text("batch-size: many\n")
    with pytest.raises(ConfigError, match=r"^--batch-size is many in run\.yaml, expected a whole number$"):
        parse(["--config", "run.yaml"])
    assert parse(["--config", "run.yaml", "--batch-size", "3"]).config.batch_size == 3


def test_preset_takes_the_synchronous_algorithm_too() -> None:
    assert parse(["--preset", "quickstart", "--algo", "grpo"]).config.algo == "grpo"


def test_help_has_every_flag_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help"]) == 0
    text = capsys.readouterr().out
    sections = {title: text.index(f"\n{title}:\n") for title in GROUPS}
    assert list(sections.values()) == sorted(sections.values())
    ends = [*list(sections.values())[1:], len(text)]
    for (title, start), end in zip(sections.items(), ends, strict=True):
        for name in GROUPS[title].model_fields:
            assert f"\n  --{name.replace('_', '-')}" in text[start:end], name


def test_every_flag_takes_its_default_back() -> None:
    argv = []
    for name, field in TrainConfig.model_fields.items():
        if field.default is not None:
            argv += [f"--{name.replace('_', '-')}", str(field.default).lower()]
    assert parse(argv).config == TrainConfig()
    assert build_parser().format_help().count("--no-async-drop-stale-batches") == 1


def test_dry_run_prints_the_plan_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsm_trainer.trainers.prepare.count_cuda_devices", lambda config: 0)
    argv = "--preset quickstart --dry-run --async-rollout-workers 3 --batch-size 15 --max-steps 40 --seed 7"
    assert train.main(argv.split()) == 0
    out = capsys.readouterr().out
    plan = dict(
        line.strip().split("  ", 1) for line in out.splitlines() if line.startswith("  ") and "  " in line.strip()
    )
    plan = {key: value.strip() for key, value in plan.items()}
    assert plan["--seed"] == "7"
    assert plan["--ckpt"] == str(Path.cwd() / "runs/quickstart-0001/preset/model")
    assert plan["machines"] == "1 run, 1 trainer, 3 rollout worker(s), 1 engine(s)"
    assert plan["dataset"] == "512 rows, 34 batches an epoch"
    assert plan["batch"] == "15 prompts x 16 samples = 240 sequences"
    assert plan["steps"] == "40, of 3400 batches in 100 epoch(s)"
    assert plan["event log"] == "runs/quickstart-0001/events.arrows"
    assert json.loads(plan["scheduler"])["workers"] == 3
    assert "torch " in plan["versions"]
    assert "3 rollout workers but max_staleness 1" in out
    assert "2 of 512 rows fill no whole batch" in out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_what_is_minimised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsm_trainer.trainers.prepare.count_cuda_devices", lambda config: 0)
    argv = "--preset quickstart --dry-run --algo dapo --clip-eps 0.1 --kl-coef 0.02 --no-dynamic-sampling"
    argv += " --overlong-buffer-tokens 2"
    assert train.main(argv.split()) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("  objective ")]
    assert line.split(maxsplit=1)[1] == (
        "clip of the token ratio, 0.9 to 1.28, correction none, token-mean loss, KL k3 x 0.02, entropy x 0.05, "
        "reward falls over the last 2 tokens"
    )
    assert "sequences\n" in out, "no spare prompts without dynamic sampling"
    assert train.main(["--preset", "quickstart", "--dry-run", "--algo", "async-dapo", "--oversample-prompts", "7"]) == 0
    assert "16 prompts x 16 samples = 256 sequences; 7 spare prompts" in capsys.readouterr().out


def test_dry_run_names_the_devices_of_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsm_trainer.trainers.prepare.count_cuda_devices", lambda config: 4)
    argv = "--preset quickstart --dry-run --train-devices 0 --rollout-devices 2,3"
    assert train.main(argv.split()) == 0
    out = capsys.readouterr().out
    assert "\n  train engine      hf on cuda:0, " in out
    assert f"\n  rollout engine 1  hf (transformers {version('transformers')}) on cuda:3 in its own process\n" in out
    assert "\n  weight sync       shared-memory, drain mode\n" in out


class FakeTrainer:
    """Stands in for the trainer: what main() does around a run is under test here."""

    def __init__(self, prepared: Prepared, exit_code: int) -> None:
        self.prepared = prepared
        self.exit_code = exit_code

    def fit(self) -> Any:
        self.prepared.place_files()
        return SimpleNamespace(exit_code=self.exit_code, message="what happened")


@pytest.mark.parametrize("exit_code", [0, 1, 130])
def test_a_run_ends_with_the_trainers_exit_code_and_message(
    exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[Prepared] = []

    def build(prepared: Prepared, *, display: object) -> FakeTrainer:
        built.append(prepared)
        return FakeTrainer(prepared, exit_code)

    monkeypatch.setattr("fsm_trainer.trainers.build_trainer", build)
    assert train.main(["--preset", "quickstart", "--output-dir", "here", "--train-devices", "cpu"]) == exit_code
    assert capsys.readouterr().err.splitlines()[-1] == "fsm-train: what happened"
    assert built[0].config.ckpt == str(Path.cwd() / "here/preset/model")
    assert sorted(p.name for p in Path("here/preset").iterdir()) == ["data.jsonl", "model", "reward.py"]


def test_interrupt_before_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fsm_trainer.trainers.prepare.check_machine", interrupt)
    assert train.main(["--preset", "quickstart", "--train-devices", "cpu"]) == 130
    assert capsys.readouterr().err == "fsm-train: interrupted at once; what was not saved is lost\n"
