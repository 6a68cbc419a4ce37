"""Renders a `Summary` as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fsm_trainer.analysis.entities import place_of
from fsm_trainer.analysis.source import NS
from fsm_trainer.analysis.summary import ResidencyRow, Summary


def render(summary: Summary) -> str:
    """The whole summary, one section after the other."""
    sections = [
        _render_head(summary),
        _render_batches(summary),
        _render_residency(summary.residency),
        _render_sides(summary),
        [*_render_overlap(summary), *_render_syncs(summary)],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _render_head(summary: Summary) -> list[str]:
    versions = ", ".join(f"engine {engine}: {version}" for engine, version in summary.rollout_versions.items())
    lines = [
        f"run               {summary.path}",
        f"outcome           {_outcome(summary)}",
        f"wall time         {summary.wall_ns / NS:.3f} s, {summary.events} events",
        f"optimiser steps   {summary.steps}",
        f"train version     {summary.train_version}",
        f"rollout versions  {versions or 'none loaded'}",
    ]
    if summary.resumed_from is not None:
        lines.insert(1, f"resumed           from {summary.resumed_from} at step {summary.first_version}")
    if summary.problem is not None:
        lines.insert(2, f"log               {summary.problem}")
    return lines


def _outcome(summary: Summary) -> str:
    if summary.state == "running":
        return "still going: the log is being written, these are the figures so far"
    if summary.state == "crashed":
        return "crashed: the log has no run_end, these are the figures up to its last whole batch"
    return f"{summary.outcome}: {summary.message}" if summary.message else str(summary.outcome)


def _render_batches(summary: Summary) -> list[str]:
    lines = ["batches           " + ", ".join(f"{count} {state}" for state, count in summary.batches.items())]
    drops = ", ".join(f"{count} {reason}" for reason, count in summary.drops.items())
    lines.append(f"drops by reason   {drops or 'none'}")
    if summary.staleness:
        lines.append("staleness         trained  dropped")
        lines.extend(f"  {row.staleness:>7}         {row.trained:>7}  {row.dropped:>7}" for row in summary.staleness)
    return lines


def _render_residency(rows: Sequence[ResidencyRow]) -> list[str]:
    ordered = sorted(rows, key=lambda row: place_of(row.machine, row.entity))
    lines = []
    for entity, group in groupby(ordered, key=lambda row: row.entity):
        lines.append(f"{entity:<18}        seconds       %")
        for row in group:
            name = row.state if row.cause is None else f"{row.state} ({row.cause})"
            lines.append(f"  {name:<28}{row.ns / NS:>10.3f}  {100 * row.share:>5.1f} %")
    return lines


def _render_sides(summary: Summary) -> list[str]:
    sides = summary.sides
    if sides is None:
        return []
    return [
        f"idle share        rollout workers {100 * sides.rollout_idle:.1f} %, trainer {100 * sides.trainer_idle:.1f} %",
        f"bound by          {sides.bound}",
    ]


def _render_syncs(summary: Summary) -> list[str]:
    found = summary.syncs
    if found is None:
        return []
    speed = "" if found.bytes_per_s is None else f" at {found.bytes_per_s / 1e9:.3g} GB/s"
    size = [] if found.nbytes is None else [f"{found.nbytes / 1e6:.3g} MB{speed}"]
    parts = (("pause", found.pause_s), ("transfer", found.transfer_s), ("resume", found.resume_s))
    times = [f"{name} {1e3 * mean:.1f} ms" for name, mean in parts if mean is not None]
    return [f"weight syncs      {found.loads} loads, each {', '.join([*size, *times])}"]


def _render_overlap(summary: Summary) -> list[str]:
    found = summary.overlap
    if found is None:
        return []
    reached = f"this run {found.speedup:.2f}x, {100 * found.reached:.1f} % of the limit"
    if summary.synchronous:
        reached = "nothing overlaps in a synchronous run, only in one of an async algorithm"
    return [
        f"per step          rollout {1e3 * found.rollout_s:.1f} ms (reward {1e3 * found.reward_s:.1f} ms, "
        f"{100 * found.reward_s / found.rollout_s if found.rollout_s else 0.0:.1f} % of it), "
        f"train {1e3 * found.train_s:.1f} ms, "
        f"sync {1e3 * found.sync_s:.1f} ms; one after the other {1e3 * found.synchronous_s:.1f} ms, "
        f"here {1e3 * found.step_s:.1f} ms",
        f"limit of overlap  {found.limit:.2f}x; {reached}",
    ]
