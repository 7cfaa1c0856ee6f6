"""The trace is what Chrome and Perfetto read: named threads, complete events in microseconds, JSON as it is."""

from __future__ import annotations

import json

from weft.schedule import chrome_trace, generate, simulate


def test_events_of_a_small_schedule() -> None:
    events = chrome_trace(simulate(generate("zero_bubble", num_ranks=2, num_microbatches=1)))
    assert json.loads(json.dumps(events)) == events
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert threads == ["rank 0", "rank 1"]
    work = [(e["tid"], e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert work == [
        (0, "0F0", "forward", 0, 1e6),
        (0, "0I0", "backward_input", 3e6, 1e6),
        (0, "0W0", "backward_weight", 4e6, 1e6),
        (1, "1F0", "forward", 1e6, 1e6),
        (1, "1I0", "backward_input", 2e6, 1e6),
        (1, "1W0", "backward_weight", 3e6, 1e6),
    ]
    assert events[-1]["args"] == {"stage": 1, "microbatch": 0}


def test_updates_are_events_too() -> None:
    events = chrome_trace(simulate(generate("pipedream", num_ranks=2, num_microbatches=2, num_steps=1)))
    assert sum(event.get("cat") == "update" for event in events) == 4
