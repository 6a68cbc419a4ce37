"""`--config FILE.yaml`: the same keys as the flags, in kebab or snake case. Knows nothing of the settings' meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fsm_trainer.config.errors import ConfigError, one_line, shown, suggestion
from fsm_trainer.config.groups import LISTED, MAPPED
from fsm_trainer.config.train_config import TrainConfig

_SCALARS = (str, int, float, bool, type(None))
_SECTIONS = {section: name for name, section in MAPPED.items()}


def read_config_file(path: str) -> dict[str, Any]:
    """Settings of a file by field name. Raises ConfigError naming file, key and value."""
    root = _compose(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path} holds no mapping, expected lines such as `batch-size: 16`")
    values: dict[str, Any] = {}
    for key_node, value_node in root.value:
        key, value = _key(key_node), _construct(value_node, path)
        if isinstance(value, list) and key.replace("-", "_") in LISTED:
            value = ",".join(str(each) for each in value)
        name = _field_name(key, value, path)
        if name in values:
            raise ConfigError(f"{key!r} is set twice in {path}; keep one of the two")
        values[name] = value
    return values


def _compose(path: str) -> yaml.Node | None:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        raise ConfigError(f"--config {shown(path)} {why}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text; give the path of a YAML file") from error
    except ValueError as error:  # a null character in the path
        raise ConfigError(f"--config {shown(path)} is no path: {error}; give the path of a YAML file") from error
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _invalid(path, error) from error
    except RecursionError as error:
        raise ConfigError(f"--config {path} is nested too deeply, expected lines such as `batch-size: 16`") from error


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
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        # What PyYAML's constructors let through for text that is not what its form or tag says, as in 2020-13-45.
        text = shown(node.value if isinstance(node, yaml.ScalarNode) else one_line(error))
        raise ConfigError(
            f"--config {path} line {node.start_mark.line + 1}: {text} is no {node.tag.rpartition(':')[2]}; "
            f"text goes in quotes"
        ) from error
    finally:
        loader.dispose()


def _key(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    return f"a {'mapping' if isinstance(node, yaml.MappingNode) else 'sequence'} as a key"


def _field_name(key: str, value: Any, path: str) -> str:
    name = key.replace("-", "_")
    name = {"train_tp_size": "tp_size", **_SECTIONS}.get(name, name)
    fields = TrainConfig.model_fields
    if name not in fields:
        close = suggestion(key.replace("_", "-"), [field.replace("_", "-") for field in fields])
        what = f"unknown setting {key!r} (value {shown(repr(value))})"
        raise ConfigError(f"{what} in {path}{close or '; see fsm-train --help'}")
    if name in MAPPED:
        return _mapped(name, key, value, path)
    if not isinstance(value, _SCALARS):
        raise ConfigError(
            f"{key!r} is {shown(repr(value))} in {path}, expected one value, not a {type(value).__name__}"
        )
    # YAML's own booleans (yes, no, on, off) would count as numbers.
    if isinstance(value, bool) and fields[name].annotation is not bool:
        raise ConfigError(f"{key!r} is {str(value).lower()} in {path}, expected no true or false here; see --help")
    return name


def _mapped(name: str, key: str, value: Any, path: str) -> str:
    """A setting of several values by name: a section, or texts as on the command line."""
    if not isinstance(value, (dict, list, str, type(None))):
        raise ConfigError(f"{key!r} is {shown(repr(value))} in {path}, expected a section of KEY: VALUE lines")
    return name
