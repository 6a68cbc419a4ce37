"""What a run's event log says, as data frames and as a summary. docs/analysis.md says what each column means.

>>> from fsm_trainer.analysis import load_events, load_samples, summarize
>>> from fsm_trainer.analysis import batches_frame, residency_frame, staleness_frame, steps_frame, sync_frame
"""

from fsm_trainer.analysis.batches import batches_frame
from fsm_trainer.analysis.columns import COLUMNS
from fsm_trainer.analysis.frames import load_events
from fsm_trainer.analysis.residency import residency_frame
from fsm_trainer.analysis.samples import load_samples
from fsm_trainer.analysis.staleness import staleness_frame
from fsm_trainer.analysis.steps import steps_frame
from fsm_trainer.analysis.summary import Summary, summarize
from fsm_trainer.analysis.syncs import sync_frame

__all__ = [
    "COLUMNS",
    "Summary",
    "batches_frame",
    "load_events",
    "load_samples",
    "residency_frame",
    "staleness_frame",
    "steps_frame",
    "summarize",
    "sync_frame",
]
