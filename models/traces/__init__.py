"""Recorded workloads: importers to one normal form, its replay as sessions, and fits of its distributions."""

from breakeven.models.traces.read import FORMATS as FORMATS
from breakeven.models.traces.read import read_trace as read_trace
from breakeven.models.traces.replay import fit_window as fit_window
from breakeven.models.traces.replay import inferences as inferences
from breakeven.models.traces.replay import trace_sessions as trace_sessions
from breakeven.models.traces.rows import Options as Options
from breakeven.models.traces.trace import Reading as Reading
from breakeven.models.traces.trace import Trace as Trace
