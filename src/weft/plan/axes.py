"""All axes of the planner, in the order of their rules and traffic rows."""

from __future__ import annotations

from weft.core import axes
from weft.plan import adafactor, muon
from weft.plan.axis import PlanAxis
from weft.plan.cp import rules as cp_rules
from weft.plan.cp import traffic as cp_traffic
from weft.plan.dp import rules as dp_rules
from weft.plan.dp import traffic as dp_traffic
from weft.plan.ep import rules as ep_rules
from weft.plan.ep import traffic as ep_traffic
from weft.plan.pp import rules as pp_rules
from weft.plan.pp import traffic as pp_traffic
from weft.plan.tp import rules as tp_rules
from weft.plan.tp import traffic as tp_traffic
from weft.plan.tp_grid import rules as tp_grid_rules
from weft.plan.tp_grid import traffic as tp_grid_traffic

AXES: tuple[PlanAxis, ...] = (
    PlanAxis(name="dp", rules=dp_rules.RULES, traffic=dp_traffic.traffic),
    PlanAxis(name=axes.TP, rules=tp_rules.RULES, traffic=tp_traffic.traffic),
    PlanAxis(name="tp_grid", rules=tp_grid_rules.RULES, traffic=tp_grid_traffic.traffic),
    PlanAxis(name=axes.CP, rules=cp_rules.RULES, traffic=cp_traffic.traffic),
    PlanAxis(name=axes.EP, rules=ep_rules.RULES, traffic=ep_traffic.traffic),
    PlanAxis(name=axes.PP, rules=pp_rules.RULES, traffic=pp_traffic.traffic),
    PlanAxis(name="optimizer", traffic=lambda view: [*muon.traffic(view), *adafactor.traffic(view)]),
)
