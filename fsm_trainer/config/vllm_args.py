"""Arguments that pass through to vLLM's engine: from `KEY=VALUE` texts or a file's section to a mapping, and which of
their values do not go with the rest of a configuration.

What their values mean is vLLM's affair: it refuses at its start what it cannot use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic_core import PydanticCustomError

from fsm_trainer.engines.vllm_fields import SETTLED

_EXPECTED = "KEY=VALUE, an argument of vLLM's engine such as enforce-eager=true"


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
        if name in SETTLED:
            flag = SETTLED[name]
            what = f"decides that by {flag}; give it there" if flag else "needs its own value of that; leave it out"
            raise ValueError(f"{shown}: the run {what}")
        if name == "enable_prefix_caching" and not isinstance(value, bool):
            raise ValueError(f"{shown}, expected true or false")
        if name == "max_model_len" and not (isinstance(value, int) and value >= tokens):
            raise ValueError(
                f"{shown}, expected at least {tokens}: --max-prompt-tokens and --max-new-tokens together; leave it out"
            )
