"""Draws a `StalenessReport`: staleness along the run, its effects by value, and lengths of what was not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fsm_trainer.analysis.staleness_report import StalenessReport

SUFFIXES = (".png", ".svg", ".pdf")
_EFFECTS = {
    "reward_mean": "mean reward",
    "ratio_mean": "mean ratio",
    "approx_kl": "KL (nats a token)",
    "logprob_gap": "gap (nats a token)",
}
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""Okabe and Ito's, told apart by most colour-blind people."""


def draw(report: StalenessReport, path: Path) -> None:
    """Draw it into a file of one of `SUFFIXES`. ValueError if matplotlib is not installed; OSError."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(
            "--plot needs the package matplotlib, which is not installed; pip install 'fsm-trainer[plot]'"
        ) from error
    # Without pyplot: no display, no state that is left behind.
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes: dict[str, Any] = figure.subplot_mosaic([["steps"] * 4, list(_EFFECTS), ["lengths"] * 2 + ["rewards"] * 2])
    _draw_steps(axes["steps"], report)
    for name, words in _EFFECTS.items():
        _draw_effect(axes[name], report, name, words)
    tokens = "completion tokens, mean of a batch" if report.samples_kept else "tokens generated in a batch"
    _draw_groups(axes["lengths"], report, "tokens", tokens)
    _draw_groups(axes["rewards"], report, "reward", "reward, mean of a batch")
    figure.savefig(path)


def _draw_steps(axes: Any, report: StalenessReport) -> None:
    table = report.by_step
    axes.set(xlabel="optimiser step", ylabel="staleness (steps)", title="Staleness of the consumed batches")
    if table.empty:
        axes.text(0.5, 0.5, "no batch was consumed", ha="center", transform=axes.transAxes)
        return
    width = table["last_step"] - table["first_step"] + 1
    bottom = np.zeros(len(table))
    for (part, words), colour in zip((("in_flight", "in flight"), ("in_queue", "in queue")), _COLOURS, strict=False):
        heights = table[f"staleness_{part}"].to_numpy()
        axes.bar(table["first_step"], heights, width, bottom, align="edge", color=colour, label=words, linewidth=0)
        bottom += heights
    axes.step(
        [*table["first_step"], table["last_step"].max() + 1],
        [*table["staleness_max"], 0],
        where="post",
        color="black",
        linewidth=1,
        label="largest",
    )
    axes.set_ylim(0, max(float(table["staleness_max"].max()), 1.0) * 1.3)  # room for the legend
    axes.legend(loc="upper right", ncols=3)


def _draw_effect(axes: Any, report: StalenessReport, name: str, words: str) -> None:
    frame = report.batches
    known = frame[frame[name].notna()]
    axes.set(xlabel="staleness", title=words)
    if known.empty:
        axes.text(0.5, 0.5, "not logged", ha="center", transform=axes.transAxes)
        return
    values = [group[name].to_numpy() for _, group in known.groupby("staleness")]
    places = sorted(known["staleness"].unique())
    axes.boxplot(values, positions=[int(place) for place in places], widths=0.6, showfliers=False)
    axes.plot(report.by_value["staleness"], report.by_value[name], "o", color=_COLOURS[0], label="mean")
    axes.set_xticks([int(place) for place in places])


def _draw_groups(axes: Any, report: StalenessReport, name: str, words: str) -> None:
    known = report.measures[report.measures[name].notna()]
    axes.set(xlabel=words, ylabel="share of its batches", title="Trained against not trained")
    if known.empty:
        axes.text(0.5, 0.5, "no samples kept", ha="center", transform=axes.transAxes)
        return
    bins = np.histogram_bin_edges(known[name], bins=min(30, max(len(known) // 4, 5)))
    for (group, rows), colour in zip(known.groupby("group"), _COLOURS[1:] + _COLOURS[:1], strict=False):
        weights = np.full(len(rows), 1.0 / len(rows))
        colour = _COLOURS[0] if group == "trained" else colour
        axes.hist(
            rows[name],
            bins,
            weights=weights,
            histtype="stepfilled",
            alpha=0.5,
            color=colour,
            label=f"{group} ({len(rows)})",
        )
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)  # room for the legend
    axes.legend(loc="upper right", ncols=2)
