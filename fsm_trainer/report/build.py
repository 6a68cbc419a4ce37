"""Puts the report's page together: its sections from a run's data, the template, the charts and the library that draws.

Every text of a run is escaped: by the template in the page, and as JSON without `<` in its script.
"""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsm_trainer.eventlog.reader import EventLog
from fsm_trainer.report.advice import Advice, advise
from fsm_trainer.report.chart import Chart
from fsm_trainer.report.run_data import RunData
from fsm_trainer.report.sections import head, sections_of

_PAGE = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Report:
    """A built page."""

    html: str
    advice: Advice
    charts: tuple[str, ...]
    """Names of the charts in it."""


def build_report(log: EventLog) -> Report:
    """The page of a run, finished or not. ValueError if the log is empty, or plotly or jinja2 is not installed."""
    if not log.table.num_rows:
        raise ValueError(f"{log.path} holds no event, so there is nothing to report")
    template, library = _template(), _library()
    data = RunData(log)
    advice = advise(data)
    sections = sections_of(data, advice)
    charts = [chart for section in sections for chart in section.charts]
    html: str = template.render(
        **head(data),
        sections=sections,
        charts_json=_json_in_html(charts),
        plotly=library,
        css=(_PAGE / "report.css").read_text(encoding="utf-8"),
        script=(_PAGE / "report.js").read_text(encoding="utf-8"),
        path=log.path,
        version=version("fsm-trainer"),
        made_at=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return Report(html, advice, tuple(chart.name for chart in charts))


def _json_in_html(charts: list[Chart]) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps([chart.spec() for chart in charts], allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ValueError(f"the report needs {error.name}: pip install 'fsm-trainer[report]'") from error
    loader = jinja2.FileSystemLoader(_PAGE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.jinja")


@cache
def _library() -> str:
    """plotly.js, compressed, as text that may stand in a page."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ValueError(f"the report needs {error.name}: pip install 'fsm-trainer[report]'") from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
