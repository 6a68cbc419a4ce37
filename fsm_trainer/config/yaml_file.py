"""`--config FILE.yaml`: the same keys as the flags, in kebab or snake case. Knows nothing of the settings' meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fsm_trainer.config.errors import ConfigError, one_line, suggestion
from fsm_trainer.config.train_config import TrainConfig

_SCALARS = (str, int, float, bool, type(None))


def read_config_file(path: str) -> dict[str, Any]:
    """Settings of a file by field name. Raises ConfigError naming file, key and value."""
    root = _compose(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path} holds no mapping, expected lines such as `batch-size: 16`")
    values: dict[str, Any] = {}
    for key_node, value_node in root.value:
        key, value = str(key_node.value), _construct(value_node, path)
        name = _field_name(key, value, path)
        if name in values:
            raise ConfigError(f"{key!r} is set twice in {path}; keep one of the two")
        values[name] = value
    return values


def _compose(path: str) -> yaml.Node | None:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text; give the path of a YAML file") from error
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _invalid(path, error) from error


def _invalid(path: str, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    place = f" line {mark.line + 1}" if mark is not None else ""
    reason = getattr(error, "problem", None) or error
    return ConfigError(f"--config {path}{place} is not valid YAML: {one_line(reason)}")


def _construct(node: yaml.Node, path: str) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except yaml.YAMLError as error:
        raise _invalid(path, error) from error
    finally:
        loader.dispose()


def _field_name(key: str, value: Any, path: str) -> str:
    name = key.replace("-", "_")
    name = "tp_size" if name == "train_tp_size" else name
    fields = TrainConfig.model_fields
    if name not in fields:
        close = suggestion(key.replace("_", "-"), [field.replace("_", "-") for field in fields])
        raise ConfigError(f"unknown setting {key!r} (value {value!r}) in {path}{close or '; see fsm-train --help'}")
    if not isinstance(value, _SCALARS):
        raise ConfigError(f"{key!r} is {value!r} in {path}, expected one value, not a {type(value).__name__}")
    # YAML's own booleans (yes, no, on, off) would count as numbers.
    if isinstance(value, bool) and fields[name].annotation is not bool:
        raise ConfigError(f"{key!r} is {str(value).lower()} in {path}, expected no true or false here; see --help")
    return name
