"""docs/machines.md and README's drawing, made from the edge tables that the scheduler runs on.

`python -m fsm_trainer.replay.diagrams` rewrites both; a test keeps them current.
"""

from __future__ import annotations

from pathlib import Path

from fsm_trainer.core.machines import TABLES, TERMINAL, Edge

PAGE = "docs/machines.md"
README = "README.md"
MARKS = ("<!-- machines: made by `make docs` -->\n", "<!-- end of machines -->")
"""Around README's drawing."""
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


def overview() -> str:
    """The two machines that overlap, without the edges by which a run ends."""
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR"]
    for name, title in (("rollout", "rollout worker"), ("trainer", "trainer")):
        _, initial, edges = TABLES[name]
        lines += [f'    state "{title}" as {name} {{', "        direction LR", f"        [*] --> {initial.value}"]
        kept = [e for e in edges if e.dest not in TERMINAL]
        lines += [f"        {e.source.value} --> {e.dest.value}: {e.trigger}" for e in kept]
        lines.append("    }")
    return "\n".join([*lines, "    rollout --> trainer: train queue", "```", ""])


def with_overview(readme: str) -> str:
    """A README with its drawing renewed; ValueError if the marks are missing."""
    before, mark, rest = readme.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise ValueError(f"{README} lacks the marks {MARKS[0].strip()} and {MARKS[1]} around its drawing")
    return before + mark + overview() + end + after


def _grouped(name: str) -> list[tuple[str, list[Edge]]]:
    """Edges of one trigger, target and meaning together, in table order."""
    groups: dict[tuple[str, str, str], list[Edge]] = {}
    for edge in TABLES[name][2]:
        groups.setdefault((edge.trigger, edge.dest.value, edge.meaning), []).append(edge)
    return [(trigger, edges) for (trigger, _, _), edges in groups.items()]


def _names(edges: list[Edge]) -> str:
    return ", ".join(e.source.value for e in edges)


def write(root: Path) -> None:
    """Rewrite the page and README's drawing below the repository's root."""
    (root / PAGE).write_text(page(), encoding="utf-8")
    readme = root / README
    readme.write_text(with_overview(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2])
