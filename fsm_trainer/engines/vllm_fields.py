"""Which arguments of vLLM's engine people may give: those that the installed vLLM takes, but what a run settles.

They are read from its source: importing it takes seconds.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTLED: dict[str, str | None] = {
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
    "logprobs_mode": None,
    "worker_extension_cls": None,
    "skip_tokenizer_init": None,
    "runner": None,
    "task": None,
    "enable_lora": None,
    "served_model_name": None,
    "generation_config": None,
    "disable_log_stats": None,
    "enable_log_requests": None,
}
"""Argument that follows from a run's own settings -> the flag that says it; None where it has one right value."""
_FILE = ("engine", "arg_utils.py")
_CLASSES = ("EngineArgs", "AsyncEngineArgs")
"""The second one inherits the first one's fields."""
_TYPES: dict[str, tuple[type, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text (in quotes, where it reads as something else)"),
    "None": (type(None), "null"),
}
"""What a plain type of an argument is called in vLLM's source -> its values, and in words."""
Fields = dict[str, frozenset[str] | None]
"""Argument -> names of the types it takes (those of `_TYPES`); None where it takes others too."""


def engine_fields(package: str = "vllm") -> Fields | None:
    """The arguments of vLLM's `AsyncEngineArgs`; None where this version keeps them elsewhere, or there is none."""
    spec = importlib.util.find_spec(package)  # of a package itself, which does not import it
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, *_FILE)
        if path.is_file():
            return _fields_of(path.read_text("utf-8"))
    return None


def _fields_of(source: str) -> Fields | None:
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    if not classes.keys() >= set(_CLASSES):
        return None
    found: Fields = {}
    for name in _CLASSES:
        for node in classes[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = _plain(node.annotation)
    return found


def _plain(annotation: ast.expr) -> frozenset[str] | None:
    """The plain types of an annotation such as `int | None`; None if there are others in it."""
    names = frozenset(part.strip() for part in ast.unparse(annotation).split("|"))
    return names if names <= _TYPES.keys() else None


def check_known_args(args: Mapping[str, Any], fields: Fields) -> None:
    """ValueError for an argument that is none of vLLM's `fields`, or whose value is of a type that it does not take."""
    for name, value in args.items():
        shown = f"--vllm-arg {name}={json.dumps(value, default=repr)}"
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
