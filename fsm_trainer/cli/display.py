"""The progress display of a run: a live panel on a terminal, plain lines elsewhere. A view; it decides nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsm_trainer.config import TrainConfig
from fsm_trainer.trainers.progress import Display, Progress

PLAIN_INTERVAL_S = 5.0
REFRESH_PER_S = 4.0


def make_display(config: TrainConfig) -> Display | None:
    """The display that the configuration and the terminal ask for."""
    kind = config.progress
    if kind == "auto":
        kind = "rich" if sys.stderr.isatty() else "plain"
    if kind == "none":
        return None
    return RichDisplay(config) if kind == "rich" else PlainDisplay()


class _Ticker:
    """A thread that does something every few moments, until it is ended."""

    def __init__(self, interval_s: float, do: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._do = do
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsm-display", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._do()


class PlainDisplay:
    """One line on standard error every few seconds, while there is something new to say."""

    def __init__(self, interval_s: float = PLAIN_INTERVAL_S, write: Callable[[str], None] | None = None) -> None:
        """`write` takes whole lines."""
        self._interval_s = interval_s
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._last = ""

    def start(self, read: Callable[[], Progress]) -> None:
        """Begin to print."""
        self._read = read
        self._ticker = _Ticker(self._interval_s, self._print)

    def stop(self) -> None:
        """Print the last line and end."""
        self._ticker.end()
        self._print()

    def _print(self) -> None:
        line = plain_line(self._read())
        if line != self._last:
            self._last = line
            self._write(line)


def plain_line(p: Progress) -> str:
    """One moment in one line."""
    s, total = p.status, "?" if p.total_steps is None else p.total_steps
    parts = [f"step {s.train_version}/{total}"]
    if p.metrics:
        parts.append(f"reward {p.metrics['reward_mean']:.3f}")
        parts.append(f"staleness {p.metrics['staleness_mean']:.0f}")
    parts.append(f"queue {s.queue_len}/{s.queue_size}")
    parts.extend(f"starting engine-{i} ({seconds:.0f} s)" for i, seconds in p.starting_s.items())
    parts.extend(f"rollout-{i} {_with_cause(w, s.worker_causes[i])}" for i, w in enumerate(s.workers))
    parts.append(f"trainer {_with_cause(s.trainer, s.trainer_cause)}")
    parts.append(f"{p.tokens_per_s:.0f} generated tok/s")
    parts.append(f"left {_duration(p.left_s)}")
    return "  ".join(parts)


class RichDisplay:
    """A live panel on a terminal."""

    def __init__(self, config: TrainConfig, console: Console | None = None) -> None:
        """`config` gives the title."""
        self._title = f"{config.algo}  {config.output_dir}"
        self._console = console or Console(stderr=True)

    def start(self, read: Callable[[], Progress]) -> None:
        """Begin to draw."""
        # Its own refreshing thread is not waited for when it stops, so ours draws.
        self._live = Live(get_renderable=lambda: self.render(read()), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)
        self._ticker = _Ticker(1 / REFRESH_PER_S, self._live.refresh)

    def stop(self) -> None:
        """Draw the last moment and end."""
        self._ticker.end()
        self._live.stop()

    def render(self, p: Progress) -> Table:
        """One moment as a panel."""
        s = p.status
        table = Table.grid(padding=(0, 2))
        table.add_row("step", _steps(p), "left", _duration(p.left_s))
        table.add_row("reward", _number(p, "reward_mean", ".3f"), "generated tok/s", f"{p.tokens_per_s:.0f}")
        table.add_row("loss", _number(p, "loss", ".4f"), "staleness", _number(p, "staleness_mean", ".0f"))
        table.add_row("queue", f"{s.queue_len} of {s.queue_size}", "dropped", str(p.dropped))
        table.add_row("trainer", _with_cause(s.trainer, s.trainer_cause), "version", str(s.train_version))
        for i, worker in enumerate(s.workers):
            engine = i % len(s.engines)
            version = s.rollout_versions[engine]
            took = f" ({p.starting_s[engine]:.0f} s)" if engine in p.starting_s else ""
            table.add_row(
                f"rollout-{i}",
                _with_cause(worker, s.worker_causes[i]),
                f"engine-{engine}",
                f"{s.engines[engine]}{took}, version {version if version >= 0 else '-'}",
            )
        panel = Table.grid()
        panel.add_row(Text(self._title, style="bold"))
        panel.add_row(ProgressBar(total=p.total_steps or 1, completed=s.train_version, width=60))
        panel.add_row(table)
        return panel


def _steps(p: Progress) -> str:
    return f"{p.status.train_version} of {'?' if p.total_steps is None else p.total_steps}  ({p.status.run})"


def _number(p: Progress, name: str, form: str) -> str:
    return format(p.metrics[name], form) if name in p.metrics else "-"


def _with_cause(state: str, cause: str) -> str:
    return f"{state} ({cause.replace('_', ' ')})" if cause else state


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
