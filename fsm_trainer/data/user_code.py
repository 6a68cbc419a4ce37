"""Load a function from a user's Python file, `FILE.py` or `FILE.py:FUNCTION`. Knows nothing of what it is for."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast


class UserCodeError(ValueError):
    """A user's file that is missing, does not run, or lacks the function; one line with file and line number."""


def split_spec(spec: str, default_function: str) -> tuple[Path, str]:
    """File and function name of a `FILE.py[:FUNCTION]` text."""
    file, colon, function = spec.rpartition(":")
    if not colon or not function.isidentifier():
        return Path(spec).expanduser(), default_function
    return Path(file).expanduser(), function


def load_function(spec: str, default_function: str, purpose: str) -> Callable[..., Any]:
    """The function a spec names; the file is run once, with its own folder first on the import path meanwhile."""
    path, name = split_spec(spec, default_function)
    if not path.is_file():
        raise UserCodeError(f"{purpose} file {path} does not exist; give the path of a Python file")
    file = path.resolve()
    module_spec = importlib.util.spec_from_file_location(f"fsm_trainer_user_{path.stem}", file)
    if module_spec is None or module_spec.loader is None:
        raise UserCodeError(f"{purpose} file {path} is not a Python file; give a file that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    folder, home = str(file.parent), Path.cwd()
    sys.path.insert(0, folder)
    # Dataclasses and pickle look a class's module up there.
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too: a script's own way out would end the command with that code and without a word.
        raise UserCodeError(f"{purpose} file {path} does not run: {where(error, file)}") from error
    finally:
        # A file that changes folders or paths must not move the run's own relative ones.
        os.chdir(home)
        if folder in sys.path:
            sys.path.remove(folder)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        has = f"it has {', '.join(functions)}" if functions else "it has no function"
        raise UserCodeError(f"{purpose} file {path} does not define {name}; {has}")
    return cast("Callable[..., Any]", function)


def where(error: BaseException, path: Path) -> str:
    """`line N: Type: message` with the deepest line of the user's own file, on one line."""
    own = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
    line = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    place = f"line {line}: " if line is not None else ""
    return " ".join(f"{place}{type(error).__name__}: {message}".split())
