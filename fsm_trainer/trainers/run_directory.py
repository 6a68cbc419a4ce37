"""Where a run keeps its files, and the one place that knows their names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.eventlog.layout import COMPACT_NAMES
from fsm_trainer.eventlog.schema import LOG_NAME


@dataclass(frozen=True)
class RunDirectory:
    """Paths below one run's folder; `checkpoints` may lie elsewhere (`--save-path`)."""

    path: Path
    checkpoints: Path

    @classmethod
    def create(cls, config: TrainConfig) -> RunDirectory:
        """Make the folders of a resolved configuration and write its `config.json`; ConfigError over another run."""
        named = cls.of(config)
        # A reward that runs code may well change the working folder.
        run = cls(named.path.absolute(), named.checkpoints.absolute())
        config = config.model_copy(update={"output_dir": str(run.path), "save_path": str(run.checkpoints)})
        run.path.mkdir(parents=True, exist_ok=True)
        try:
            with run.config.open("x", encoding="utf-8") as file:
                file.write(config.to_json())
        except FileExistsError as error:
            raise ConfigError(f"--output-dir {run.path} holds another run by now; give a new folder") from error
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        if config.log_samples != "none":
            run.samples.mkdir(exist_ok=True)
        return run

    @classmethod
    def of(cls, config: TrainConfig) -> RunDirectory:
        """The folders that a resolved configuration names; makes nothing."""
        assert config.output_dir is not None and config.save_path is not None, config
        return cls(Path(config.output_dir), Path(config.save_path))

    @property
    def config(self) -> Path:
        """The run's settings."""
        return self.path / "config.json"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.path / LOG_NAME

    @property
    def kept_log(self) -> Path:
        """The event log as the run left it: the stream, or what it was compacted into."""
        compacted = (self.path / name for name in COMPACT_NAMES.values())
        return next((path for path in compacted if path.is_file()), self.events)

    @property
    def metrics(self) -> Path:
        """One JSON object a train step."""
        return self.path / "metrics.jsonl"

    @property
    def reward_output(self) -> Path:
        """What reward functions print in their processes; there if they print."""
        return self.path / "rewards.log"

    @property
    def samples(self) -> Path:
        """Folder of one Parquet file a prompt batch."""
        return self.path / "samples"

    def checkpoint(self, train_version: int) -> Path:
        """Folder of one checkpoint."""
        return self.checkpoints / f"step-{train_version:06d}"
