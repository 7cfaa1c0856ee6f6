"""Pipeline schedules as data: the order of actions per rank, its legality, its simulated timeline, its drawings.

`generate` (registry, generators) gives a `Schedule`, `check_schedule` checks it, `simulate` times it; `draw_grid`,
`draw_svg` and `chrome_trace` draw it; `formulas` has the closed forms; `mean_costs`, `gaps` and `replay` read a
measured timeline. No torch, no tensors: the engine executes the actions, the planner reads the figures.
"""

from weft.schedule.actions import Action, Kind
from weft.schedule.calls import Actions, Calls
from weft.schedule.draw import draw_grid
from weft.schedule.in_flight import InFlight, count_in_flight
from weft.schedule.legality import check_schedule
from weft.schedule.measured import Gap, GapKind, gap_seconds, gaps, mean_costs, replay
from weft.schedule.registry import NAMES, check_request, generate
from weft.schedule.schedule import Schedule, WeightRule
from weft.schedule.simulate import StageCosts, simulate
from weft.schedule.svg import draw_svg
from weft.schedule.timeline import TimedAction, Timeline
from weft.schedule.trace import chrome_trace
from weft.schedule.versions import staleness, version_for, versions_read, weight_versions

__all__ = [
    "NAMES",
    "Action",
    "Actions",
    "Calls",
    "Gap",
    "GapKind",
    "InFlight",
    "Kind",
    "Schedule",
    "StageCosts",
    "TimedAction",
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
    "replay",
    "simulate",
    "staleness",
    "version_for",
    "versions_read",
    "weight_versions",
]
