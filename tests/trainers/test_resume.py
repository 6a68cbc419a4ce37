"""A run that goes on from a checkpoint continues exactly, takes over the settings, and refuses what cannot be."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fsm_trainer import AsyncPolicyTrainer, AsyncTrainBatchQueue, PolicyOnlyTrainer, TrainConfig
from fsm_trainer.config import ConfigError
from fsm_trainer.config.checkpoint import read_checkpoint
from fsm_trainer.config.resume import find_resume_point
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.presets import preset_config
from fsm_trainer.trainers import RunResult, build_trainer
from fsm_trainer.trainers.prepare import prepare
from tests.trainers.helpers import ROWS, log_of, metrics_of, run_end, train_batch, varied_reward

Make = Callable[..., TrainConfig]
TIMES = ("_s", "_per_s", "time_s", "mfu", "queue_len", "tokens_per_s", "flops_per_s")
"""Endings of what differs between two runs of one seed."""


def train(config: TrainConfig, reward: Any = varied_reward, rows: Any = ROWS) -> RunResult:
    return build_trainer(prepare(config, reward_fn=reward, dataset=rows)).fit()


def learnt(run: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of each step, without times."""
    return [{k: v for k, v in line.items() if not k.endswith(TIMES)} for line in metrics_of(run)]


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights, optimiser, random numbers."""
    found = {}
    for path in checkpoint.glob("*.safetensors"):
        found.update({f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()})
    return found


def check_same_checkpoint(a: Path, b: Path) -> None:
    first, second = tensors_of(a), tensors_of(b)
    assert len(first) > 30
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert (a / "prompt_source.json").read_text() == (b / "prompt_source.json").read_text()
    assert (a / "train_state.json").read_text() == (b / "train_state.json").read_text()


def samples_of(run: Path, first: int, last: int) -> list[Any]:
    """Everything sampled for some batches."""
    tables = [pq.read_table(run / "samples" / f"batch-{i:06d}.parquet") for i in range(first, last)]
    return [table.drop_columns(["state"]).to_pylist() for table in tables]


KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"algo": "grpo"},
    "gspo": {"algo": "gspo"},
    "staleness-1": {"async_admission": "lockstep"},
    "staleness-3": {"async_admission": "lockstep", "async_max_staleness": 3, "async_rollout_workers": 2},
    "interval-2": {"async_admission": "lockstep", "async_max_staleness": 2, "async_sync_interval_steps": 2},
    "paced-0": {"async_max_staleness": 0},
    "reference": {"algo": "grpo", "kl_coef": 0.1, "reference_refresh_steps": 3},
    "lora": {"async_admission": "lockstep", "lora_rank": 2},
    "cosine": {"algo": "grpo", "lr_decay_style": "cosine", "lr_decay_steps": 9, "min_lr": 0.0, "lr_warmup_steps": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_n_steps_and_n_more_are_2n_steps_to_the_bit(kind: str, make_config: Make, tmp_path: Path) -> None:
    """An epoch has 6 batches, so the run goes over the end of one."""
    if kind == "lora":
        pytest.importorskip("peft", reason="the extra lora is not installed")

    def config(name: str, **changes: Any) -> TrainConfig:
        return make_config(**{"save_interval": 4, "seed": 7, "output_dir": str(tmp_path / name), **changes})

    whole = train(config("whole", max_steps=12, **KINDS[kind]), rows=ROWS[:18])
    first = train(config("first", max_steps=8, **KINDS[kind]), rows=ROWS[:18])
    rest = train(
        TrainConfig.build({"resume": str(tmp_path / "first"), "max_steps": 12, "output_dir": str(tmp_path / "rest")}),
        rows=ROWS[:18],
    )
    assert [r.outcome for r in (whole, first, rest)] == ["completed"] * 3, rest.message
    assert learnt(first.run.path) + learnt(rest.run.path) == learnt(whole.run.path)
    assert [line["step"] for line in learnt(rest.run.path)] == [9, 10, 11, 12]
    assert samples_of(rest.run.path, 8, 12) == samples_of(whole.run.path, 8, 12)
    check_same_checkpoint(rest.run.checkpoint(12), whole.run.checkpoint(12))
    log_of(rest.run.path)


def test_every_checkpoint_of_a_run_leads_to_the_same_end(make_config: Make, tmp_path: Path) -> None:
    whole = train(make_config(async_admission="lockstep", async_max_staleness=2, save_interval=2, max_steps=6))
    for step in (2, 4):
        resume = {"resume": str(whole.run.checkpoint(step)), "output_dir": str(tmp_path / f"from-{step}")}
        rest = train(TrainConfig.build(resume))
        check_same_checkpoint(rest.run.checkpoint(6), whole.run.checkpoint(6))


def test_a_resumed_run_can_be_resumed(make_config: Make, tmp_path: Path) -> None:
    whole = train(make_config(algo="grpo", max_steps=6))
    part = train(make_config(algo="grpo", max_steps=2, output_dir=str(tmp_path / "part-0")))
    for i, steps in ((1, 4), (2, 6)):
        name = str(tmp_path / f"part-{i}")
        part = train(TrainConfig.build({"resume": str(part.run.path), "max_steps": steps, "output_dir": name}))
    check_same_checkpoint(part.run.checkpoint(6), whole.run.checkpoint(6))


def test_what_the_new_run_says_of_itself(make_config: Make, tmp_path: Path) -> None:
    first = train(make_config(algo="grpo", max_steps=2))
    second = train(
        TrainConfig.build(
            {"resume": str(first.run.path), "max_steps": 3, "lr": 5e-4, "output_dir": str(tmp_path / "b")}
        )
    )
    config = TrainConfig.from_json(second.run.config.read_text())
    assert config == second_config(make_config, first, tmp_path)
    assert second.message.startswith("completed 3 steps (2 before it was resumed)")
    log = read_log(second.run.path)
    assert log.scheduler_config["first_version"] == 2
    assert SchedulerConfig.from_dict(log.scheduler_config).first_batch == 2
    before = (first.run.path / "events.arrows").read_bytes()
    assert (first.run.path / "events.arrows").read_bytes() == before
    assert metrics_of(second.run.path)[0]["lr"] == 5e-4


def second_config(make_config: Make, first: RunResult, tmp_path: Path) -> TrainConfig:
    before = TrainConfig.from_json(first.run.config.read_text())
    changes = {
        "resume": str(first.run.checkpoint(2)),
        "max_steps": 3,
        "lr": 5e-4,
        "output_dir": str(tmp_path / "b"),
        "save_path": str(tmp_path / "b" / "checkpoints"),
    }
    return before.model_copy(update=changes)


@pytest.mark.parametrize("admission", ["paced", "greedy"])
def test_no_prompt_is_skipped_or_repeated(admission: str, make_config: Make, tmp_path: Path) -> None:
    """Batches open at the checkpoint go back to the source, whatever order their runs took."""
    shape: dict[str, Any] = {"async_admission": admission, "async_max_staleness": 3, "async_rollout_workers": 3}
    shape |= {"max_prompt_attempts": 50, "entropy_coef": 0.01, "epochs": 2, "save_interval": 3}
    first = train(make_config(max_steps=6, **shape), rows=ROWS[:18])
    last = train(
        TrainConfig.build(
            {"resume": str(first.run.checkpoint(3)), "max_steps": 100, "output_dir": str(tmp_path / "rest")}
        ),
        rows=ROWS[:18],
    )
    assert last.outcome == "completed", last.message
    at = read_checkpoint(first.run.checkpoint(3))
    trained: Counter[tuple[int, int]] = Counter()
    for run, steps in ((first.run.path, range(1, 4)), (last.run.path, range(4, 100))):
        ends = {r.batch_id: r.train_version for r in log_of(run) if r.machine == "batch" and r.dest == "trained"}
        for batch, version in ends.items():
            if version in steps and batch is not None:
                rows = pq.read_table(run / "samples" / f"batch-{batch:06d}.parquet").to_pylist()
                trained.update({(row["epoch"], row["row"]) for row in rows})
        if run == last.run.path:
            assert min(batch for batch in ends if batch is not None) >= at.first_batch
    assert trained == Counter({(epoch, row): 1 for epoch in range(2) for row in range(18)})


def test_a_failed_run_goes_on_where_it_failed(make_config: Make, tmp_path: Path) -> None:
    def fails(record: RewardRecord) -> float:
        if record.metadata["batch_id"] == 3:
            raise RuntimeError("no more")
        return varied_reward(record)

    whole = train(make_config(algo="grpo", max_steps=6, output_dir=str(tmp_path / "whole")))
    failed = train(make_config(algo="grpo", max_steps=6), reward=fails)
    assert (failed.outcome, failed.train_version) == ("failed", 3)
    rest = train(TrainConfig.build({"resume": str(failed.run.path), "output_dir": str(tmp_path / "rest")}))
    assert rest.outcome == "completed", rest.message
    assert learnt(rest.run.path) == learnt(whole.run.path)[3:]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"lora_rank": 2},
            "--lora-rank is 2, but not set in the run of .*, and a resumed run cannot",
        ),
        ({"seed": 9}, "--seed is 9, but 0 in the run of --resume .*step-000002, and a resumed run cannot change it"),
        ({"batch_size": 4}, "--batch-size is 4, but 3 in the run of"),
        ({"algo": "gspo"}, "--algo is gspo, but grpo in the run of"),
        ({"shuffle": False}, "--shuffle is False, but"),
        ({"max_steps": 2}, "its 2 optimiser steps are all that --max-steps 2 asks for; give more"),
        ({}, "its 2 optimiser steps are all that --max-steps 2 asks for; give more"),
    ],
)
def test_what_cannot_go_on_is_refused(given: dict[str, Any], message: str, finished: RunResult, tmp_path: Path) -> None:
    config = TrainConfig.build({"resume": str(finished.run.path), "output_dir": str(tmp_path / "new"), **given})
    with pytest.raises(ConfigError, match=message):
        prepare(config, reward_fn=varied_reward, dataset=ROWS)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def finished(make_config: Make) -> RunResult:
    return train(make_config(algo="grpo", max_steps=2, save_interval=1))


def test_another_dataset_is_refused(finished: RunResult) -> None:
    config = TrainConfig.build({"resume": str(finished.run.path), "max_steps": 9})
    with pytest.raises(ConfigError, match="the checkpoint's dataset had 40 rows, this one has 29"):
        prepare(config, reward_fn=varied_reward, dataset=ROWS[:29])
    with pytest.raises(ConfigError, match="the checkpoint's prompts differ from these though there are as many rows"):
        prepare(config, reward_fn=varied_reward, dataset=[*ROWS[:39], {"prompt": "8888=", "solutions": []}])


def test_another_model_is_refused(finished: RunResult, tmp_path: Path) -> None:
    from fsm_trainer.engines.tiny import build_tiny_checkpoint

    other = build_tiny_checkpoint(tmp_path / "other", seed=0, hidden=32, layers=2, heads=2, head_dim=16, context=32)
    config = TrainConfig.build({"resume": str(finished.run.path), "max_steps": 9, "ckpt": str(other)})
    with pytest.raises(ConfigError, match="--resume .*: it is of another architecture than ckpt .*other"):
        prepare(config, reward_fn=varied_reward, dataset=ROWS)


def test_used_up_prompts_are_said(make_config: Make) -> None:
    done = train(make_config(algo="grpo", max_steps=None, epochs=1, entropy_coef=0.01), rows=ROWS[:6])
    assert done.train_version == 2
    config = TrainConfig.build({"resume": str(done.run.path)})
    with pytest.raises(ConfigError, match="every prompt of every epoch is used up; give more --epochs"):
        prepare(config, reward_fn=varied_reward, dataset=ROWS[:6])
    more = config.model_copy(update={"epochs": 3, "output_dir": f"{done.run.path}-more"})
    assert (
        train(
            TrainConfig.build({k: getattr(more, k) for k in ("resume", "epochs", "output_dir")}), rows=ROWS[:6]
        ).train_version
        == 6
    )


@pytest.mark.parametrize(
    "name", ["model.safetensors", "train_state.safetensors", "prompt_source.json", "run_config.json"]
)
@pytest.mark.parametrize("damage", ["edited", "truncated", "gone"])
def test_damaged_files_are_refused(name: str, damage: str, finished: RunResult) -> None:
    path = finished.run.checkpoint(2) / name
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] if damage == "truncated" else whole[:-9] + b"~" + whole[-8:])
    with pytest.raises(ConfigError) as caught:
        prepare(
            TrainConfig.build({"resume": str(finished.run.path), "max_steps": 9}), reward_fn=varied_reward, dataset=ROWS
        )
    assert name in str(caught.value)
    if name != "run_config.json":
        said = {"edited": "is not what was written", "truncated": "bytes", "gone": "is missing"}[damage]
        assert said in str(caught.value)
    assert f"give {finished.run.checkpoint(1)} to go on from the one before" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{}", "null", "[1", '{"format": 1}'])
def test_a_damaged_manifest_matters_only_of_the_newest(text: str, finished: RunResult) -> None:
    older, newest = (finished.run.checkpoint(step) / "manifest.json" for step in (1, 2))
    right = older.read_text(encoding="utf-8")
    older.write_text(text, encoding="utf-8")
    assert find_resume_point(str(finished.run.path)).checkpoint.path == newest.parent
    older.write_text(right, encoding="utf-8")
    shutil.copytree(older.parent, older.parent.with_name("a-copy-of-the-first-one"))
    assert find_resume_point(str(finished.run.path)).checkpoint.path == newest.parent
    newest.write_text(text, encoding="utf-8")
    for given in (finished.run.path, newest.parent):
        with pytest.raises(ConfigError, match=f"is damaged: .*; give {older.parent} to go on from the one before$"):
            find_resume_point(str(given))
    assert find_resume_point(str(older.parent)).checkpoint.train_version == 1


def test_files_damaged_while_a_newer_manifest_is_too(finished: RunResult) -> None:
    (finished.run.checkpoint(2) / "manifest.json").write_text("{}", encoding="utf-8")
    (finished.run.checkpoint(1) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="model.safetensors is missing$"):
        find_resume_point(str(finished.run.checkpoint(1))).check_files()


def test_a_checkpoint_cut_short_is_never_taken(finished: RunResult, tmp_path: Path) -> None:
    """Without its manifest the newest is nothing, and the one before is the newest."""
    (finished.run.checkpoint(2) / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="has no manifest.json: its save was cut short|no run"):
        prepare(TrainConfig.build({"resume": str(finished.run.checkpoint(2))}), reward_fn=varied_reward, dataset=ROWS)
    config = TrainConfig.build({"resume": str(finished.run.path), "output_dir": str(tmp_path / "b")})
    rest = train(config)
    assert rest.message.startswith("completed 2 steps (1 before it was resumed)")


def test_a_newer_manifest_is_refused(finished: RunResult) -> None:
    path = finished.run.checkpoint(2) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(ConfigError, match="has format 2, which a newer fsm_trainer wrote; this one reads 1"):
        prepare(TrainConfig.build({"resume": str(finished.run.path)}), reward_fn=varied_reward, dataset=ROWS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no such folder"),
        (lambda path: path.mkdir(), "it holds no run"),
        (lambda path: path.write_text("x"), "it is a file; give a run's folder"),
    ],
)
def test_what_is_no_run_is_said(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(ConfigError, match=message):
        prepare(TrainConfig.build({"resume": str(tmp_path / "x")}))


def test_a_run_without_a_checkpoint_is_said(finished: RunResult) -> None:
    shutil.rmtree(finished.run.checkpoints)
    with pytest.raises(ConfigError, match="the run has no checkpoint yet; start it anew"):
        prepare(TrainConfig.build({"resume": str(finished.run.path)}))


def test_latest_is_the_run_that_saved_last(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run below runs/ has a checkpoint"):
        prepare(TrainConfig.build({"resume": "latest"}))
    for name in ("a", "b"):
        train(make_config(algo="grpo", max_steps=1, output_dir=f"runs/{name}"))
    (tmp_path / "runs" / "c").mkdir()
    (tmp_path / "runs" / "c" / "config.json").write_text("{}")
    prepared = prepare(TrainConfig.build({"resume": "latest", "max_steps": 2}), reward_fn=varied_reward, dataset=ROWS)
    assert prepared.config.resume == str(tmp_path / "runs" / "b" / "checkpoints" / "step-000001")
    assert prepared.config.output_dir == "runs/grpo-0001"
    shutil.rmtree(tmp_path / "runs" / "b" / "checkpoints")
    prepared = prepare(TrainConfig.build({"resume": "latest", "max_steps": 2}), reward_fn=varied_reward, dataset=ROWS)
    assert prepared.config.resume == str(tmp_path / "runs" / "a" / "checkpoints" / "step-000001")


def test_a_moved_run_and_one_that_saves_elsewhere(make_config: Make, tmp_path: Path) -> None:
    first = train(make_config(algo="grpo", max_steps=1, save_path=str(tmp_path / "kept")))
    for_elsewhere = prepare(
        TrainConfig.build({"resume": str(first.run.path), "max_steps": 2}), reward_fn=varied_reward, dataset=ROWS
    )
    assert for_elsewhere.config.resume == str(tmp_path / "kept" / "step-000001")
    second = train(make_config(algo="grpo", max_steps=1, output_dir=str(tmp_path / "here")))
    shutil.move(second.run.path, tmp_path / "there")
    moved = prepare(
        TrainConfig.build({"resume": str(tmp_path / "there"), "max_steps": 2}), reward_fn=varied_reward, dataset=ROWS
    )
    assert moved.config.resume == str(tmp_path / "there" / "checkpoints" / "step-000001")


def test_only_the_newest_and_the_best_are_kept(make_config: Make) -> None:
    """The reward is highest at first."""

    def falling(record: RewardRecord) -> float:
        return varied_reward(record) - 100.0 * record.metadata["batch_id"]

    config = make_config(algo="grpo", max_steps=5, save_interval=1, save_total_limit=2, save_best="reward_mean")
    result = train(config, reward=falling)
    assert result.outcome == "completed", result.message
    kept = sorted(path.name for path in result.run.checkpoints.iterdir())
    assert kept == ["step-000001", "step-000004", "step-000005"]
    assert (
        read_checkpoint(result.run.checkpoint(4)).metrics["reward_mean"]
        == metrics_of(result.run.path)[3]["reward_mean"]
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [("reward_meen", "did you mean reward_mean or "), ("accuracy", "docs/metrics.md lists them")],
)
def test_a_best_that_is_no_metric_is_refused_before_the_run(make_config: Make, name: str, meant: str) -> None:
    config = make_config(algo="grpo", save_total_limit=1, save_best=name)
    with pytest.raises(ValueError, match=f"--save-best is {name}, which is not the name of a metric; {meant}"):
        train(config)
    assert not Path(str(config.output_dir)).exists()


def test_a_best_that_this_run_does_not_have_is_said_at_the_first_step(make_config: Make) -> None:
    result = train(make_config(algo="grpo", save_total_limit=1, save_best="kl"))
    assert result.outcome == "failed"
    assert "--save-best is kl, expected one of" in result.message
    assert "reward_mean" in result.message


def test_a_save_that_fails_fails_the_run_and_leaves_the_older_ones(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsm_trainer.engines import hf_train

    save, count = hf_train.save_state, []

    def full_disk(*args: Any, **kwargs: Any) -> None:
        count.append(1)
        if len(count) == 2:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(hf_train, "save_state", full_disk)
    result = train(make_config(algo="grpo", max_steps=4, save_interval=1))
    assert (result.outcome, result.exit_code) == ("failed", 1)
    assert "trainer: save failed: OSError: [Errno 28] No space left on device" in result.message
    assert [path.name for path in result.run.checkpoints.iterdir()] == ["step-000001"]
    read_checkpoint(result.run.checkpoint(1)).check_files()
    assert run_end(result.run.path).reason == "failed"


def test_a_run_from_a_queue_goes_on_with_a_queue(make_config: Make, tmp_path: Path) -> None:
    """Nobody knows where its producers stand, so it has no place in the data; ids and versions go on."""

    def filled(*versions: int) -> AsyncTrainBatchQueue:
        queue = AsyncTrainBatchQueue(maxsize=8)
        for version in versions:
            queue.put(train_batch(0, version))
        queue.close()
        return queue

    first = AsyncPolicyTrainer(make_config(max_steps=9, max_logprob_gap=0), queue=filled(0, 0)).fit()
    assert first.outcome == "completed", first.message
    resume = TrainConfig.build({"resume": str(first.run.path), "output_dir": str(tmp_path / "rest")})
    with pytest.raises(ConfigError, match="is of a run whose batches came from a queue; give a queue to this one too"):
        prepare(resume, reward_fn=varied_reward, dataset=ROWS)
    rest = AsyncPolicyTrainer(resume, queue=filled(2)).fit()
    assert rest.outcome == "completed", rest.message
    assert [(line["step"], line["batch_id"]) for line in metrics_of(rest.run.path)] == [(3, 2)]


def test_the_trainer_of_the_wrong_kind_is_refused(finished: RunResult, tmp_path: Path) -> None:
    resume = TrainConfig.build({"resume": str(finished.run.path), "max_steps": 3, "output_dir": str(tmp_path / "b")})
    with pytest.raises(ValueError, match="AsyncPolicyTrainer runs an asynchronous algorithm, got 'grpo'"):
        AsyncPolicyTrainer(resume, reward_fn=varied_reward, dataset=ROWS)
    assert PolicyOnlyTrainer(resume, reward_fn=varied_reward, dataset=ROWS).fit().train_version == 3


def test_what_a_preset_was_given_as_an_object_is_wanted_again(tmp_path: Path) -> None:
    small: dict[str, Any] = {"max_new_tokens": 2, "n_samples": 2, "rollout_host": "inline", "threads": 1}
    first = train(preset_config("quickstart", output_dir=str(tmp_path / "a"), max_steps=1, **small), rows=None)
    resume = TrainConfig.build({"resume": str(first.run.path), "max_steps": 2, "output_dir": str(tmp_path / "b")})
    with pytest.raises(
        ConfigError, match="a Python object instead of --reward-fn-path.*; give --reward-fn-path, or resume"
    ):
        prepare(resume)
    assert train(resume, rows=None).outcome == "completed"
    assert not (tmp_path / "b" / "preset").exists()


@pytest.mark.parametrize("given", ["neither", "dataset", "reward"])
def test_objects_of_the_run_before_are_asked_for_by_name(given: str, finished: RunResult) -> None:
    resume = TrainConfig.build({"resume": str(finished.run.path), "max_steps": 3})
    lacking = {
        "neither": "--dataset-path and --reward-fn-path",
        "dataset": "--reward-fn-path",
        "reward": "--dataset-path",
    }[given]
    with pytest.raises(ConfigError) as caught:
        prepare(
            resume,
            reward_fn=varied_reward if given == "reward" else None,
            dataset=ROWS if given == "dataset" else None,
        )
    assert str(caught.value).endswith(
        f"the run before was given a Python object instead of {lacking}, and no checkpoint keeps one; "
        f"give {lacking}, or resume from Python with the object"
    )


def test_a_run_goes_on_from_any_folder(
    make_config: Make, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings were relative to the folder it was started in."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    shutil.copytree(model, home / "model")
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:9]), encoding="utf-8")
    (home / "score.py").write_text("def score(record):\n    return len(record.completion) % 3 / 2\n", encoding="utf-8")
    loader = "def load_training_dataset(path, default_loader):\n    return default_loader(path)\n"
    (home / "loader.py").write_text(loader, encoding="utf-8")
    monkeypatch.chdir(home)
    relative = {
        **{"ckpt": "model", "dataset_path": "data.jsonl", "dataset_loader_fn": "loader.py"},
        **{"reward_fn_path": "score.py:score, builtin:exact_match", "output_dir": "run", "save_path": "kept"},
    }
    first = train(
        make_config(algo="grpo", max_steps=1, reward_executor="thread", entropy_coef=0.1, **relative), None, None
    )
    assert first.outcome == "completed", first.message
    monkeypatch.chdir(elsewhere)
    resume = TrainConfig.build({"resume": "../home/run", "max_steps": 2, "output_dir": "run"})
    rest = train(resume, None, None)
    assert rest.message.startswith("completed 2 steps (1 before it was resumed)")
    recorded = json.loads(rest.run.config.read_text())
    assert {name: recorded[name] for name in relative} == {
        "ckpt": f"{home}/model",
        "dataset_path": f"{home}/data.jsonl",
        "dataset_loader_fn": f"{home}/loader.py",
        "reward_fn_path": f"{home}/score.py:score,builtin:exact_match",
        "output_dir": f"{elsewhere}/run",
        "save_path": f"{elsewhere}/run/checkpoints",
    }


def test_files_of_the_run_before_that_are_gone_can_be_given_anew(tmp_path: Path) -> None:
    small: dict[str, Any] = {"max_new_tokens": 2, "n_samples": 2, "rollout_host": "inline", "threads": 1}
    kept, preset = tmp_path / "kept", tmp_path / "a" / "preset"
    first = preset_config(
        "quickstart", output_dir=str(tmp_path / "a"), save_path=str(kept), max_steps=1, batch_size=4, **small
    )
    assert train(first, None, None).outcome == "completed"
    shutil.move(preset, tmp_path / "moved")
    given: dict[str, Any] = {"resume": str(kept / "step-000001"), "max_steps": 2, "output_dir": str(tmp_path / "b")}
    with pytest.raises(ConfigError) as caught:
        prepare(TrainConfig.build(given))
    assert str(caught.value) == (
        f"--resume {kept}/step-000001: the run before read --ckpt {preset}/model and "
        f"--dataset-path {preset}/data.jsonl and --reward-fn-path {preset}/reward.py, not there any more; "
        f"give --ckpt and --dataset-path and --reward-fn-path anew"
    )
    given["ckpt"], given["reward_fn_path"] = str(tmp_path / "moved" / "model"), str(tmp_path / "moved" / "reward.py")
    with pytest.raises(ConfigError, match="the run before read --dataset-path .*; give --dataset-path anew$"):
        prepare(TrainConfig.build(given))
    given["dataset_path"] = str(tmp_path / "moved" / "data.jsonl")
    assert train(TrainConfig.build(given), None, None).outcome == "completed"
