"""Break the scheduler in every way listed in `mutants.txt`, and take away each edge of its machines: `make mutants`.

Each mutant is written into a copy of the package in a temporary folder, and the tests of the core and the simulation
are run on it until one fails, which is printed. A mutant that no test refuses survives; then the status is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from fsm_trainer.core.machines import TABLES

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".txt")
TESTS = (
    "core/test_policy.py",
    "core/test_batch_queue.py",
    "core/test_admission.py",
    "core/test_shutdown.py",
    "core/test_rules.py",
    "core",
    "simulate/test_explorer.py",
    "simulate",
)
"""In the order they are run: the quickest to refuse come first."""
NOT_THESE = ("test_mutants.py", "test_live_runs.py", "test_docs.py", "test_crash.py")
"""This check's own test, and those that need more of the project than is copied."""
TIME_LIMIT_S = 300
_FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", re.MULTILINE)


class Mutant(NamedTuple):
    """One wrong scheduler: in `file`, `old` becomes `new`."""

    name: str
    file: str
    old: str
    new: str


class Verdict(NamedTuple):
    """What became of a mutant: the test that refused it, or None if it survived."""

    mutant: Mutant
    killer: str | None
    seconds: float


def edge_mutants() -> list[Mutant]:
    """Each edge of each machine taken away."""
    anchor = "TABLES: dict[str, tuple["
    found = []
    for table, (_, _, edges) in TABLES.items():
        variable = f"{table.upper()}_EDGES"
        for edge in edges:
            keep = f"not (e.trigger == {edge.trigger!r} and e.source.value == {edge.source.value!r})"
            line = f"{variable} = tuple(e for e in {variable} if {keep})\n"
            name = f"edge-{table}-{edge.source.value}-{edge.trigger}"
            found.append(Mutant(name, "core/machines.py", anchor, line + anchor))
    return found


def rule_mutants(text: str) -> list[Mutant]:
    """The mutants of a list in the format of `mutants.txt`."""
    file, found = "", []
    for block in text.split("\n\n"):
        lines = block.strip("\n").split("\n")
        if lines[0].startswith("["):
            file = lines[0].strip("[]")
        elif file:
            old = "\n".join(line[1:] for line in lines if line.startswith("-"))
            added = [line[1:] for line in lines if line.startswith("+")]
            whole = "" if added else "\n"
            found.append(Mutant(lines[0].removeprefix("# "), file, old + whole, "\n".join(added)))
    return found


def all_mutants() -> list[Mutant]:
    """Tables first."""
    return edge_mutants() + rule_mutants(LIST.read_text(encoding="utf-8"))


def copy_tree(target: Path) -> Path:
    """A copy of what the tests need."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fsm_trainer", target / "fsm_trainer", ignore=ignored)
    for name in ("tests/core", "tests/simulate"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", *NOT_THESE))
    (target / "docs").mkdir()
    for name in ("tests/__init__.py", "pyproject.toml", "docs/what-if.md"):
        shutil.copy(ROOT / name, target / name)
    for path in (ROOT / "tests").glob("*.txt"):
        shutil.copy(path, target / "tests")
    return target


def run_tests(tree: Path, tests: tuple[str, ...]) -> str | None:
    """The first test that fails there, or None."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=100"]
    try:
        done = subprocess.run(
            [*command, *(f"tests/{t}" for t in tests)],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "(the tests did not end)"
    if done.returncode == 0:
        return None
    failed = _FAILED.findall(done.stdout)
    if failed:
        return str(failed[0])
    if "Timeout" in done.stdout + done.stderr:
        return "(a test did not end)"
    raise RuntimeError(f"no test failed, and yet pytest ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def mutate(mutant: Mutant) -> str:
    """The source of its file with the mutant in it; ValueError unless the piece to replace occurs exactly once."""
    source = (ROOT / "fsm_trainer" / mutant.file).read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(
            f"mutant {mutant.name}: expected once in {mutant.file}, found {source.count(mutant.old)} times"
        )
    return source.replace(mutant.old, mutant.new)


_moments = count(1_000_000_000)


def _write(path: Path, source: str) -> None:
    """Each version gets a modification time of its own, or Python might run the compiled form of another."""
    path.write_text(source, encoding="utf-8")
    moment = next(_moments)
    os.utime(path, (moment, moment))


def judge(mutant: Mutant, tree: Path, tests: tuple[str, ...]) -> Verdict:
    """Put a mutant into a tree, test it there and put the original back."""
    begun = time.monotonic()
    target = tree / "fsm_trainer" / mutant.file
    original = target.read_text(encoding="utf-8")
    _write(target, mutate(mutant))
    try:
        return Verdict(mutant, run_tests(tree, tests), time.monotonic() - begun)
    finally:
        _write(target, original)


def check_unbroken(tree: Path, tests: tuple[str, ...]) -> None:
    """RuntimeError if the tests fail on the scheduler as it is: then they would refuse every mutant for nothing."""
    failed = run_tests(tree, tests)
    if failed is not None:
        raise RuntimeError(f"{failed} fails without any mutant, so no verdict would mean anything")


def judge_all(mutants: list[Mutant], tests: tuple[str, ...], jobs: int) -> Iterator[Verdict]:
    """Verdicts in the order of the mutants; each job has a tree of its own."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            trees.put(copy_tree(Path(folder, str(number))))
        check_unbroken(copy_tree(Path(folder, "unbroken")), tests)

        def job(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return judge(mutant, tree, tests)
            finally:
                trees.put(tree)

        yield from pool.map(job, mutants)


def report(verdicts: Iterator[Verdict]) -> int:
    """Print the table as it comes; the number of survivors."""
    survivors, tried = [], 0
    for verdict in verdicts:
        tried += 1
        killer = verdict.killer or "SURVIVES"
        print(f"{verdict.mutant.name:<48} {killer}  {verdict.seconds:.1f} s", flush=True)
        if verdict.killer is None:
            survivors.append(verdict.mutant.name)
    print(f"{tried} mutants, {tried - len(survivors)} refused, {len(survivors)} survive {' '.join(survivors)}".rstrip())
    return len(survivors)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to try; all if none is named")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th mutant from the K-th on")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="tests to run, under tests/")
    args = parser.parse_args(argv)
    mutants = all_mutants()
    unknown = set(args.names) - {m.name for m in mutants}
    if unknown:
        parser.error(f"no such mutant: {' '.join(sorted(unknown))}")
    part, parts = (int(n) for n in args.part.split("/"))
    chosen = [m for i, m in enumerate(mutants) if (m.name in args.names if args.names else i % parts == part - 1)]
    return 1 if report(judge_all(chosen, tuple(args.tests), args.jobs)) else 0


if __name__ == "__main__":
    sys.exit(main())
