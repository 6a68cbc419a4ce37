"""How often a run took each edge of each machine, and the machines as mermaid flowcharts weighted by it."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from fsm_trainer.core.machines import TABLES, TERMINAL, Edge

EdgeKey = tuple[str, str, str]
"""(trigger, source, dest)."""
MAX_WIDTH_PX = 8.0
COLUMNS = ("kind", "machine", "trigger", "source", "dest")
"""Columns of the log that it needs."""


def edge_counts(table: pa.Table) -> dict[str, dict[EdgeKey, int]]:
    """By machine, how often each of its edges was taken in an event log's table; 0 for an edge never taken."""
    moves = table.filter(pc.field("kind") == "transition")
    keys = ["machine", "trigger", "source", "dest"]
    grouped = moves.select(keys).group_by(keys).aggregate([([], "count_all")]).to_pylist()
    taken = {tuple(row[key] for key in keys): row["count_all"] for row in grouped}
    return {
        name: {key_of(edge): int(taken.get((name, *key_of(edge)), 0)) for edge in edges}
        for name, (_, _, edges) in TABLES.items()
    }


def key_of(edge: Edge) -> EdgeKey:
    """What names an edge in a log."""
    return edge.trigger, edge.source.value, edge.dest.value


def weighted_diagram(name: str, counts: Mapping[EdgeKey, int]) -> str:
    """A mermaid flowchart of one machine: each edge with its count, the wider the more often it was taken.

    Edges never taken are dotted. A flowchart, because mermaid's state diagrams have no widths of edges.
    """
    _, initial, edges = TABLES[name]
    most = max(counts.values(), default=0)
    lines = ["flowchart LR", f"    begin(( )) --> {initial.value}"]
    widths = []
    for position, edge in enumerate(edges, start=1):
        taken = counts[key_of(edge)]
        arrow = f'-->|"{edge.trigger} {taken}"|' if taken else f'-.->|"{edge.trigger}"|'
        lines.append(f"    {edge.source.value} {arrow} {edge.dest.value}")
        widths.append(f"    linkStyle {position} stroke-width:{_width(taken, most)}px")
    ends = sorted({e.dest.value for e in edges if e.dest in TERMINAL})
    shapes = [f"    {end}([{end}])" for end in ends]
    return "\n".join([*lines, *shapes, *widths])


def _width(taken: int, most: int) -> str:
    """1 px for an edge never taken; by the square root, so that a start-up edge shows beside the daily ones."""
    share = (taken / most) ** 0.5 if most else 0.0
    return f"{1.0 + (MAX_WIDTH_PX - 1.0) * share:.1f}"
