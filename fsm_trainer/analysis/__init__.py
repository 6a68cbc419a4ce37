"""What a run's event log says, as data frames and as a summary.

>>> from fsm_trainer.analysis import load_events, load_samples, summarize
"""

from fsm_trainer.analysis.frames import load_events
from fsm_trainer.analysis.samples import load_samples
from fsm_trainer.analysis.summary import Summary, summarize

__all__ = ["Summary", "load_events", "load_samples", "summarize"]
