"""Pipeline schedules as data: who computes what in which order, whether that can run, and what it costs.

The way through: `generate` (registry, generators) gives a `Schedule`, `check_schedule` judges it, `simulate` times it,
`draw_grid`, `draw_svg` and `chrome_trace` show it; `formulas` has the closed forms, `summary` the cached figures;
`mean_costs`, `gaps` and `replay` read a measured timeline.
No torch, no tensors: the engine walks the actions, the planner reads the figures.
"""

from weft.schedule.actions import Action, Kind
from weft.schedule.calls import Actions, Calls
from weft.schedule.draw import draw_grid
from weft.schedule.in_flight import InFlight, count_in_flight, peak_by_rank
from weft.schedule.legality import check_schedule
from weft.schedule.measured import Gap, GapKind, gap_seconds, gaps, mean_costs, replay
from weft.schedule.registry import NAMES, check_request, generate
from weft.schedule.schedule import Schedule, WeightRule
from weft.schedule.simulate import StageCosts, simulate
from weft.schedule.summary import ScheduleSummary, summary
from weft.schedule.svg import draw_svg
from weft.schedule.timeline import Event, Timeline
from weft.schedule.trace import chrome_trace
from weft.schedule.versions import staleness, version_for, versions_read, weight_versions

__all__ = [
    "NAMES",
    "Action",
    "Actions",
    "Calls",
    "Event",
    "Gap",
    "GapKind",
    "InFlight",
    "Kind",
    "Schedule",
    "ScheduleSummary",
    "StageCosts",
    "Timeline",
    "WeightRule",
    "check_request",
    "check_schedule",
    "chrome_trace",
    "count_in_flight",
    "draw_grid",
    "draw_svg",
    "gap_seconds",
    "gaps",
    "generate",
    "mean_costs",
    "peak_by_rank",
    "replay",
    "simulate",
    "staleness",
    "summary",
    "version_for",
    "versions_read",
    "weight_versions",
]
