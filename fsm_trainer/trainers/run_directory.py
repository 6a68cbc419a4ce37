"""Where a run keeps its files, and the one place that knows their names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsm_trainer.config import TrainConfig
from fsm_trainer.eventlog.schema import LOG_NAME


@dataclass(frozen=True)
class RunDirectory:
    """Paths below one run's folder; `checkpoints` may lie elsewhere (`--save-path`)."""

    path: Path
    checkpoints: Path

    @classmethod
    def create(cls, config: TrainConfig) -> RunDirectory:
        """Make the folders of a resolved configuration and write its `config.json`."""
        assert config.output_dir is not None and config.save_path is not None, config
        run = cls(Path(config.output_dir), Path(config.save_path))
        run.path.mkdir(parents=True, exist_ok=True)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        if config.log_samples != "none":
            run.samples.mkdir(exist_ok=True)
        (run.path / "config.json").write_text(config.to_json(), encoding="utf-8")
        return run

    @property
    def events(self) -> Path:
        """The event log."""
        return self.path / LOG_NAME

    @property
    def metrics(self) -> Path:
        """One JSON object a train step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Folder of one Parquet file a prompt batch."""
        return self.path / "samples"

    def checkpoint(self, train_version: int) -> Path:
        """Folder of one checkpoint."""
        return self.checkpoints / f"step-{train_version:06d}"
