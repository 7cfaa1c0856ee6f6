"""Whether the clock is disciplined: chronyd, or what systemd says. Between hosts the offset is measured instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.doctor.check import Diagnosis, ok, unknown, warning
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

_LARGE_OFFSET_S = 0.1


def read(machine: Machine) -> dict[str, Any]:
    tracking = machine.output("chronyc -c tracking")
    fields = (tracking or "").strip().split(",")
    if len(fields) > 13:
        return {"source": "chrony", "offset_s": float(fields[4]), "is_synchronised": fields[13] != "Not synchronised"}
    told = machine.output("timedatectl show -p NTPSynchronized --value")
    if told is not None and told.strip() in ("yes", "no"):
        return {"source": "systemd", "offset_s": None, "is_synchronised": told.strip() == "yes"}
    return {"source": "", "offset_s": None, "is_synchronised": None}


def judge(facts: dict[str, Any], situation: Situation) -> Iterator[Diagnosis]:
    clock = facts["clock"]
    fix = "start chronyd or systemd-timesyncd: logs of hosts do not line up, and certificates may be refused"
    if clock["is_synchronised"] is None:
        yield unknown("clock", "neither chronyc nor timedatectl answers")
    elif not clock["is_synchronised"]:
        state = warning("clock", "the clock is not synchronised", fix)
        yield state if situation.is_cluster else ok("clock", "not synchronised, which does for one machine")
    elif clock["offset_s"] is not None and abs(clock["offset_s"]) > _LARGE_OFFSET_S:
        yield warning("clock", f"the clock is {clock['offset_s']:+.3f} s off", fix)
    else:
        yield ok("clock", f"synchronised ({clock['source']})")
