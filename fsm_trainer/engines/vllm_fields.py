"""Which arguments the engine of the installed vLLM takes, read from its source: importing it takes seconds.

Knows nothing of which of them a run may give.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

_FILE = ("engine", "arg_utils.py")
_CLASSES = ("EngineArgs", "AsyncEngineArgs")
"""The second one inherits the first one's fields."""
_PLAIN = frozenset({"int", "float", "bool", "str", "None"})
"""Types whose values can be told apart without vLLM."""
Fields = dict[str, frozenset[str] | None]
"""Argument -> names of the types it takes (`_PLAIN` ones); None where it takes others too."""


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
    return names if names <= _PLAIN else None
