"""Arguments that pass through to vLLM's engine: from `KEY=VALUE` texts or a file's section to a mapping, which of them
the run decides itself, and which the installed vLLM does not take.

What their values mean is vLLM's affair: it refuses at its start what it cannot use.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic_core import PydanticCustomError

from fsm_trainer.engines.vllm_fields import Fields

SECTION = "vllm"
"""What a configuration file calls these arguments."""
_DECIDED = {
    "model": "--ckpt",
    "tokenizer": "--ckpt",
    "dtype": "--dtype",
    "seed": "--seed",
    "tensor_parallel_size": "--rollout-tp-size",
    "data_parallel_size": "--rollout-devices, whose devices make an engine each",
    "pipeline_parallel_size": "--rollout-tp-size, which an engine is split by here",
    "gpu_memory_utilization": "--rollout-gpu-memory-utilization",
    "device": "--rollout-devices",
    "weight_transfer_config": "--policy-sync-transport",
}
"""Argument -> the flag that says it here."""
_OURS = frozenset(
    {"logprobs_mode", "worker_extension_cls", "skip_tokenizer_init", "runner", "task", "enable_lora"}
    | {"served_model_name", "generation_config", "disable_log_stats", "enable_log_requests"}
)
"""Arguments that have one right value in a run."""
_EXPECTED = "KEY=VALUE, an argument of vLLM's engine such as enforce-eager=true"
_TYPES: dict[str, tuple[type, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text (in quotes, where it reads as something else)"),
    "None": (type(None), "null"),
}
"""What a plain type of an argument is called in vLLM's source -> its values, and in words."""


def engine_args(given: object) -> dict[str, Any]:
    """Arguments by name in snake case, of a mapping or of `KEY=VALUE` texts, whose values are YAML (so JSON too).

    PydanticCustomError for what is neither, for an argument given twice, and for a value that JSON cannot hold.
    """
    pairs = _pairs(given)
    found: dict[str, Any] = {}
    for key, value in pairs:
        name = key.strip().replace("-", "_")
        if not name.isidentifier():
            raise PydanticCustomError("vllm_arg", _EXPECTED)
        if name in found:
            raise PydanticCustomError("vllm_arg", "each argument once, but {name} is there twice", {"name": name})
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise PydanticCustomError(
                "vllm_arg", "a value of {name} that JSON can hold; text goes in quotes", {"name": name}
            ) from error
        found[name] = value
    return found


def _pairs(given: object) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return list(given.items())
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and "=" in text for text in texts):
        raise PydanticCustomError("vllm_arg", _EXPECTED)
    return [(key, _value(value)) for key, _, value in (text.partition("=") for text in texts)]


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PydanticCustomError("vllm_arg", "values that YAML or JSON can read; text goes in quotes") from error


def check_engine_args(args: Mapping[str, Any], tokens: int) -> None:
    """ValueError for an argument that the run decides; `tokens` is the longest prompt and completion together."""
    for name, value in args.items():
        shown = f"--vllm-arg {name}={value}"
        if name in _DECIDED:
            raise ValueError(f"{shown}: the run decides that by {_DECIDED[name]}; give it there")
        if name in _OURS:
            raise ValueError(f"{shown}: the run needs its own value of that; leave it out")
        if name == "enable_prefix_caching" and not isinstance(value, bool):
            raise ValueError(f"{shown}, expected true or false")
        if name == "max_model_len" and not (isinstance(value, int) and value >= tokens):
            raise ValueError(
                f"{shown}, expected at least {tokens}: --max-prompt-tokens and --max-new-tokens together; leave it out"
            )


def check_known_args(args: Mapping[str, Any], fields: Fields) -> None:
    """ValueError for an argument that is none of vLLM's `fields`, or whose value is of a type that it does not take."""
    for name, value in args.items():
        shown = f"--vllm-arg {name}={json.dumps(value)}"
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=3)
            expected = " or ".join(near) if near else "one that its documentation of engine arguments lists"
            raise ValueError(f"{shown}: the installed vLLM has no such argument, expected {expected}; correct the name")
        types = fields[name]
        if types is not None and not _is_one_of(value, types):
            expected = " or ".join(words for kind, (_, words) in _TYPES.items() if kind in types)
            raise ValueError(f"{shown}, expected {expected}; correct the value")


def _is_one_of(value: Any, types: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "bool" in types
    return any(isinstance(value, _TYPES[kind][0]) for kind in types) or (isinstance(value, int) and "float" in types)
