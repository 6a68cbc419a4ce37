"""Thousands of whole runs with random configurations, durations and faults, every invariant checked after every event.

A failing seed is reported with the smallest failing run near it; put it into tests/seeds.txt and keep it there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsm_trainer.core.events import RecordKind
from fsm_trainer.core.machines import TABLES
from fsm_trainer.simulate.shrink import try_seed
from fsm_trainer.simulate.swarm import draw_case

ROOT = Path(__file__).parents[2]
SEEDS_FILE = ROOT / "tests" / "seeds.txt"
BLOCK = 250
BLOCKS = 8
"""2,000 fixed and 2,000 fresh seeds, in blocks that a parallel test run can share out."""


def kept_seeds() -> list[int]:
    lines = [line.split("#")[0].strip() for line in SEEDS_FILE.read_text(encoding="utf-8").splitlines()]
    return [int(line) for line in lines if line]


def check(seeds: range | list[int]) -> None:
    for seed in seeds:
        failure = try_seed(seed)
        if failure is not None:
            pytest.fail(f"{failure}\nadd `{seed}` to {SEEDS_FILE.relative_to(ROOT)}", pytrace=False)


def test_kept_seeds() -> None:
    check(kept_seeds())


@pytest.mark.parametrize("block", range(BLOCKS))
def test_fixed_seeds(block: int) -> None:
    check(range(block * BLOCK, (block + 1) * BLOCK))


@pytest.mark.parametrize("block", range(BLOCKS))
def test_fresh_seeds(block: int, seeds_from: int) -> None:
    first = seeds_from + block * BLOCK
    print(f"FSM_SEEDS_FROM={seeds_from}: seeds {first} to {first + BLOCK - 1}")
    check(range(first, first + BLOCK))


def test_seeds_take_every_edge_and_meet_every_end() -> None:
    edges, outcomes, ignored, drops = set(), set(), set(), set()
    for seed in range(1000):
        result = draw_case(seed).run()
        outcomes.add(result.outcome)
        for r in result.records:
            if r.kind is RecordKind.TRANSITION:
                edges.add((r.machine, r.trigger, r.source))
            elif r.kind is RecordKind.IGNORED:
                ignored.add(str(r.reason).split(" of ")[0])
            elif r.kind is RecordKind.DROP:
                drops.add(r.reason)
    every = {(name, e.trigger, e.source.value) for name, (_, _, table) in TABLES.items() for e in table}
    assert edges == every
    assert outcomes == {"completed", "failed", "interrupted"}
    assert ignored == {"unknown", "late", "stopping", "not a completion"}
    assert drops == {"stale", "degenerate", "no_step"}


def digest(seeds: range) -> str:
    return hashlib.sha256("".join(draw_case(seed).run().digest for seed in seeds).encode()).hexdigest()


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_same_seed_gives_the_same_digest_under_any_hash_seed(hash_seed: str) -> None:
    code = "from tests.simulate.test_seeds import digest; print(digest(range(60)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == digest(range(60))
    assert digest(range(60)) != digest(range(1, 61))
