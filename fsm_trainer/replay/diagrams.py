"""docs/machines.md, made from the edge tables that the scheduler runs on and the replayer validates with.

`python -m fsm_trainer.replay.diagrams` rewrites the page; a test keeps it current.
"""

from __future__ import annotations

from pathlib import Path

from fsm_trainer.core.machines import TABLES, TERMINAL, Edge

PAGE = "docs/machines.md"
_TITLES = {
    "rollout": ("Rollout worker", "One per worker; it carries one prompt batch at a time."),
    "trainer": ("Trainer", "One; `syncing` lasts until the snapshot is exported, not until engines have loaded it."),
    "engine": ("Engine", "One per rollout engine; only `open` admits new generations."),
    "batch": ("Batch", "One per prompt batch; exactly one terminal state ends it."),
    "run": ("Run", "One; `draining` admits nothing more, `stopping` starts nothing more."),
}
_HEAD = """# Which states and transitions are there?

Generated from `core/machines.py` by `make docs`. An edge carries no condition: when it is taken is a rule of
[scheduler.md](scheduler.md); that nothing else is taken is checked on every record of every log.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(section(name) for name in TABLES)])


def section(name: str) -> str:
    """Heading, diagram and table of edges of one machine."""
    title, about = _TITLES[name]
    rows = ["| trigger | from | to | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{trigger}` | {_names(edges)} | {edges[0].dest.value} | {edges[0].meaning} |"
        for trigger, edges in _grouped(name)
    ]
    return "\n".join([f"## {title}", "", about, "", "```mermaid", diagram(name), "```", "", *rows, ""])


def diagram(name: str) -> str:
    """A mermaid state diagram: every edge, with where it begins and what ends it."""
    _, initial, edges = TABLES[name]
    lines = ["stateDiagram-v2", f"    [*] --> {initial.value}"]
    lines += [f"    {e.source.value} --> {e.dest.value}: {e.trigger}" for e in edges]
    ends = sorted({e.dest.value for e in edges if e.dest in TERMINAL})
    lines += [f"    {end} --> [*]" for end in ends]
    return "\n".join(lines)


def _grouped(name: str) -> list[tuple[str, list[Edge]]]:
    """Edges of one trigger, target and meaning together, in table order."""
    groups: dict[tuple[str, str, str], list[Edge]] = {}
    for edge in TABLES[name][2]:
        groups.setdefault((edge.trigger, edge.dest.value, edge.meaning), []).append(edge)
    return [(trigger, edges) for (trigger, _, _), edges in groups.items()]


def _names(edges: list[Edge]) -> str:
    return ", ".join(e.source.value for e in edges)


def write(root: Path) -> None:
    """Rewrite the page below the repository's root."""
    (root / PAGE).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2])
