"""The flags of `fsm-train`, made from the typed settings, and where each value came from.

Flags win over the configuration file, the file over the preset (or the run that is resumed), that over the defaults.
Knows nothing of what the settings do, and imports nothing heavy: `--help` must be quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, get_args

from pydantic.fields import FieldInfo

from fsm_trainer.cli.simulate_flags import SimulationRequest, add_simulation_flags, take_simulation_flags
from fsm_trainer.config.errors import ConfigError, flag, one_line, suggestion
from fsm_trainer.config.groups import GROUPS, LISTED, MAPPED
from fsm_trainer.config.reference import bounds, choices, default_text
from fsm_trainer.config.resume import find_resume_point
from fsm_trainer.config.train_config import TrainConfig
from fsm_trainer.config.yaml_file import read_config_file
from fsm_trainer.presets import preset_settings

_DESCRIPTION = (
    "Train a language model with GRPO, GSPO, CISPO, Dr. GRPO or DAPO (--algo), synchronously or with rollout and "
    "training overlapped by explicit state machines."
)
_ALIASES = {"tp_size": ("--train-tp-size",)}


@dataclass(frozen=True)
class Invocation:
    """What one command line asks for."""

    config: TrainConfig
    dry_run: bool = False
    simulation: SimulationRequest | None = None
    origin: dict[str, str] = field(default_factory=dict)
    """Setting -> file or preset it came from; a flag's value has no entry."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into the one kind of error users see."""
        raise ConfigError(one_line(message).replace("argument ", "", 1))


def build_parser() -> argparse.ArgumentParser:
    """The parser; it takes every value as text, the settings' own types check it."""
    parser = _Parser(
        prog="fsm-train",
        usage="fsm-train [--config FILE.yaml] [--FLAG VALUE ...]",
        description=_DESCRIPTION,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    for title, group in GROUPS.items():
        section = parser.add_argument_group(title)
        if title == "Basic":
            section.add_argument("--config", metavar="FILE.yaml", help="Settings from a file; flags win")
        for name, setting in group.model_fields.items():
            _add(section, name, setting)
        if title == "Basic":
            section.add_argument("--dry-run", action="store_true", help="Print configuration and plan, start nothing")
    add_simulation_flags(parser)
    return parser


def _add(section: argparse._ArgumentGroup, name: str, setting: FieldInfo) -> None:
    spellings = (flag(name), *_ALIASES.get(name, ()))
    if bool in (setting.annotation, *get_args(setting.annotation)):
        section.add_argument(*spellings, nargs="?", const="true", metavar="true|false", help=_help(setting))
        negated = f"--no-{flag(name)[2:]}"
        section.add_argument(negated, dest=name, action="store_const", const="false", help="The same as false")
        return
    action = "append" if name in LISTED or name in MAPPED else "store"
    metavar = "KEY=VALUE" if name in MAPPED else "|".join(choices(setting)) or name.rsplit("_", 1)[-1].upper()
    section.add_argument(*spellings, dest=name, metavar=metavar, action=action, help=_help(setting))


def _help(setting: FieldInfo) -> str:
    notes = [f"default {default_text(setting)}"] if default_text(setting) else []
    notes += [bounds(setting)] if bounds(setting) else []
    text = f"{setting.description} [{'; '.join(notes)}]" if notes else str(setting.description)
    return text.replace("%", "%%")


def parse(argv: Sequence[str]) -> Invocation:
    """Settings of a command line. Raises ConfigError; `--help` prints and raises SystemExit(0)."""
    parser = build_parser()
    namespace, extra = parser.parse_known_args(list(argv))
    if extra:
        raise ConfigError(_unknown(extra[0], parser))
    flags: dict[str, Any] = vars(namespace)
    flags.update({name: ",".join(flags[name]) for name in LISTED if name in flags})
    dry_run = bool(flags.pop("dry_run", False))
    simulation = take_simulation_flags(flags)
    config_file = flags.pop("config", None)
    origin: dict[str, str] = {}
    values: dict[str, Any] = {}
    if config_file is not None:
        values = read_config_file(config_file)
        origin = dict.fromkeys(values, config_file)
    values.update(flags)
    origin = {name: where for name, where in origin.items() if name not in flags}
    if values.get("resume") is not None:
        return Invocation(_resumed(values, origin), dry_run, origin=origin, simulation=simulation)
    preset = preset_settings(values.get("preset"))
    origin.update({name: f"the preset {values['preset']}" for name in preset if name not in values})
    config = TrainConfig.build({**preset, **values}, origin)
    return Invocation(config, dry_run, origin=origin, simulation=simulation)


def _resumed(values: dict[str, Any], origin: dict[str, str]) -> TrainConfig:
    """The settings of the run before, with those given now in their place."""
    point = find_resume_point(str(values["resume"]))
    origin.update({name: f"the run of {point.name}" for name in point.values if name not in values})
    config = TrainConfig.build(point.settings(values), origin)
    point.check_fixed(config)
    return config


def _unknown(argument: str, parser: argparse.ArgumentParser) -> str:
    name, equals, _ = argument.partition("=")
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    if not argument.startswith("-"):
        meant = suggestion(name, known) if equals else ""
        return f"unexpected argument {argument!r}{meant}; every setting is a flag, see fsm-train --help"
    return f"unknown flag {name}{suggestion(name, known) or '; see fsm-train --help'}"
