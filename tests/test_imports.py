"""The one-way arrows between rooms, and that the commands' help loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fsm_trainer"

ROOMS: dict[str, set[str]] = {
    "core": set(),
    "eventlog": {"core"},
    "runtime": {"core", "eventlog"},
    "engines": {"core.batch", "core.events", "algorithms"},
    "algorithms": {"core.batch"},
    # Reward processes die with the run, and tell failures, as engine processes do.
    "data": {"runtime.child", "runtime.failures"},
    "config": {
        "core.config",
        "data",
        "algorithms.registry",
        "algorithms.objective",
        "algorithms.advantages",
        "engines.vllm_versions",
        "engines.vllm_fields",
    },
    "presets": {"config", "engines.tiny"},
    "replay": {"core", "eventlog"},
    "analysis": {"eventlog"},
    # Takes the log's rows from the loop, as a sink, and tells failures as the threads there do.
    "tracking": {"core", "eventlog", "analysis", "runtime.loop", "runtime.failures"},
    "simulate": {"core", "eventlog", "runtime", "engines.fake_behaviour"},
    "report": {"eventlog", "analysis", "simulate"},
    "testing": {"core", "runtime", "engines", "simulate"},
    "trainers": {
        "core",
        "eventlog",
        "runtime",
        "engines",
        "algorithms",
        "data",
        "config",
        "presets",
        "tracking",
    },
    "cli": {
        "core",
        "eventlog",
        "config",
        "data",
        "presets",
        "replay",
        "analysis",
        "tracking",
        "trainers",
        "runtime",
        "engines",
        "simulate",
        "report",
    },
}
"""Room -> what of ours it may import besides itself, as a whole room or one module."""

LIBRARIES: dict[str, set[str]] = {
    "core": {"transitions"},
    "eventlog": {"pyarrow", "numpy"},
    "runtime": {"structlog"},
    "engines": {
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "vllm",
        "httpx",
        "peft",
        "bitsandbytes",
    },
    "algorithms": {"torch", "numpy"},
    "data": {"datasets", "math_verify", "pyarrow", "reasoning_gym", "transformers"},
    "config": {"pydantic", "pydantic_core", "yaml", "torch", "huggingface_hub"},
    "presets": {"transformers"},
    "replay": {"pyarrow"},
    "analysis": {"pandas", "pyarrow", "numpy", "matplotlib"},
    "tracking": {"pandas", "pyarrow", "structlog", "tensorboard", "trackio", "wandb"},
    "simulate": {"pandas", "pyarrow"},
    "report": {"pandas", "pyarrow", "numpy", "jinja2", "plotly"},
    "testing": {"numpy"},
}
"""Room -> libraries it may import; a room not listed may import any."""

LAZY_ONLY = {
    "torch": {"config", "cli", "presets", "data"},
    "transformers": {"engines", "config", "cli", "presets", "data"},
    "vllm": {"engines"},
    "httpx": {"engines"},
    "tensorboard": {"tracking"},
    "trackio": {"tracking"},
    "wandb": {"tracking"},
}
"""Library -> rooms that may import it only inside a function (or for types)."""

HEAVY = (
    "wandb",
    "tensorboard",
    "trackio",
    "matplotlib",
    "torch",
    "transformers",
    "pandas",
    "vllm",
    "datasets",
    "pyarrow",
)


def imports_of(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every module name a file imports, however deep, and whether that happens as soon as the file is imported."""
    assert isinstance(tree, ast.Module)
    at_import = {id(node) for node in _run_at_import(tree.body)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) in at_import


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _run_at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _run_at_import([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.ClassDef | ast.With):
            yield from _run_at_import(node.body)


def violations(room: str, source: str) -> list[str]:
    """What a file of `room` imports against the tables above."""
    found = []
    for name, at_import in imports_of(ast.parse(source)):
        top, _, inside = name.partition(".")
        if top == "fsm_trainer":
            target = inside.split(".")[0]
            modules = {inside, inside.rpartition(".")[0], target}
            if target in ROOMS and target != room and not modules & ROOMS[room]:
                found.append(f"imports {name}")
        elif top not in sys.stdlib_module_names:
            if room in LIBRARIES and top not in LIBRARIES[room]:
                found.append(f"imports {top}")
            if at_import and room in LAZY_ONLY.get(top, ()):
                found.append(f"imports {top} outside a function")
    return found


def test_every_folder_is_a_room() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert folders <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_along_the_arrows(room: str) -> None:
    found = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        found += [f"{path.relative_to(PACKAGE)} {what}" for what in violations(room, path.read_text(encoding="utf-8"))]
    assert found == []


def test_arrows_have_no_cycle() -> None:
    reached: dict[str, set[str]] = {room: {name.split(".")[0] for name in names} for room, names in ROOMS.items()}
    order: list[str] = []
    while len(order) < len(ROOMS):
        free = [room for room in ROOMS if room not in order and reached[room] <= set(order)]
        assert free, f"cycle among {set(ROOMS) - set(order)}"
        order += free


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("core", "import torch", ["imports torch"]),
        ("core", "import threading", []),
        ("core", "def f():\n    from fsm_trainer.runtime import loop", ["imports fsm_trainer.runtime.loop"]),
        ("config", "from fsm_trainer.core.config import Deadlines", []),
        (
            "config",
            "from fsm_trainer.core.scheduler import Scheduler",
            ["imports fsm_trainer.core.scheduler.Scheduler"],
        ),
        ("data", "import transformers", ["imports transformers outside a function"]),
        ("data", "def f():\n    import transformers", []),
        ("data", "try:\n    import transformers\nfinally:\n    pass", ["imports transformers outside a function"]),
        ("engines", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers", []),
    ],
)
def test_the_rule_itself(room: str, source: str, expected: list[str]) -> None:
    assert violations(room, source) == expected


@pytest.mark.parametrize(
    "statement",
    [
        "import fsm_trainer",
        "from fsm_trainer.cli.train import main; main(['--help'])",
        "from fsm_trainer.cli.replay import main; main(['--help'])",
    ],
)
def test_help_loads_nothing_heavy(statement: str) -> None:
    code = (
        "import sys, contextlib, io\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        f"    {statement}\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
