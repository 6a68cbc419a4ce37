"""The published schema and table are what the code says."""

from __future__ import annotations

import json
from pathlib import Path

from fsm_trainer.algorithms.registry import algorithm_names
from fsm_trainer.config import TrainConfig
from fsm_trainer.config.reference import SCHEMA_FILE, TABLE_FILE, json_schema, settings_table, with_table

ROOT = Path(__file__).parents[2]
HINT = "run `make docs`"


def test_schema_file_is_current() -> None:
    assert (ROOT / SCHEMA_FILE).read_text(encoding="utf-8") == json_schema(), HINT


def test_table_is_current() -> None:
    page = (ROOT / TABLE_FILE).read_text(encoding="utf-8")
    assert page == with_table(page), HINT


def test_schema_describes_the_runs_config_json() -> None:
    schema = json.loads(json_schema())
    written = json.loads(TrainConfig().to_json())
    assert list(schema["properties"]) == list(written)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["batch_size"]["minimum"] == 1
    assert schema["properties"]["batch_size"]["x-group"] == "Rollout"
    assert schema["properties"]["algo"]["enum"] == list(algorithm_names())
    assert all(schema["properties"][name]["default"] == value for name, value in written.items())


def test_table_rows() -> None:
    lines = settings_table().splitlines()
    assert "| `--top-p` | `1` | number, > 0, <= 1 | Nucleus sampling (1: off) |" in lines
    assert "| `--max-steps` |  | whole number, >= 1 | Optimiser steps after which the run is done |" in lines
    assert sum(line.startswith("| `--") for line in lines) == len(TrainConfig.model_fields)
