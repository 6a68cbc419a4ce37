"""Settings of a run: one typed definition from which flags, files, schema and documentation are made."""

from fsm_trainer.config.errors import ConfigError
from fsm_trainer.config.train_config import TrainConfig

__all__ = ["ConfigError", "TrainConfig"]
