"""One rank of `weft comm bench`: `python -m weft.cli.comm.rank bench.json`. Rank 0 writes the answer."""

from __future__ import annotations

import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

from weft.core.quiet import quiet_libraries


def measure(asked: dict[str, Any]) -> dict[str, Any] | None:
    """Measure as one of the given ranks; the answer on rank 0."""
    import torch

    from weft.comm.bench import BenchSpec, run_bench
    from weft.train.ranks.environment import read_local_size
    from weft.train.ranks.process import join, leave, phase

    process = join(device_type=asked["device"])
    torch.set_num_threads(1)
    on_gpu = asked["device"] != "cpu" and torch.cuda.is_available()
    local_ranks = read_local_size(os.environ)
    spec = BenchSpec(
        collectives=tuple(asked["collectives"]),
        algorithms=tuple(asked["algorithms"]),
        sizes=tuple(asked["sizes"]),
        dtype=asked["dtype"],
        repeats=asked["repeats"],
        per_node=asked["per_node"] or local_ranks,
        device_type="cuda" if on_gpu else "cpu",
    )
    with phase("measuring"):
        answer = run_bench(spec, report=_progress if process.is_main else lambda _: None)
    leave()
    answer["link"] = _link_name(on_gpu=on_gpu, is_one_host=local_ranks == process.world_size)
    place = torch.cuda.get_device_name() if on_gpu else "CPU"
    answer["machine"] = f"{date.today():%Y-%m-%d}, {process.world_size} x {place}, torch {torch.__version__}"
    return answer if process.is_main else None


def _link_name(*, on_gpu: bool, is_one_host: bool) -> str:
    """The catalogue's link between these ranks."""
    import torch

    from weft import hardware

    name = hardware.find_device(torch.cuda.get_device_name()) if on_gpu else "CPU"
    if name is None:
        return "loopback"
    found = hardware.cluster(f"{name}")
    return found.inside.name if is_one_host else found.between.name


def _progress(text: str) -> None:
    print(f"{text} …", file=sys.stderr, flush=True)


def main() -> None:
    quiet_libraries()
    from weft.train.ranks.process import report_failures

    with report_failures():
        asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        answer = measure(asked)
        if answer is not None:
            Path(asked["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
