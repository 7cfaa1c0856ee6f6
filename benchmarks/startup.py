"""Time from the command to the first finished step: `weft train` against a bare script with the same ranks and model.

    python benchmarks/startup.py [--nproc 2] [--repeat 5]

The bare script imports torch and transformers, builds the same model, joins a Gloo group, wraps it in DDP (2 ranks)
and does one step on random tokens; it is started by torchrun when there are several ranks. Turns alternate; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import os, torch, torch.distributed as dist, torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
                     num_key_value_heads=4, vocab_size=320)
model = AutoModelForCausalLM.from_config(config)
called = model
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    called = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
rows = 8 // int(os.environ.get("WORLD_SIZE", 1))
tokens = torch.randint(0, 320, (rows, 257))
logits = called(input_ids=tokens[:, :-1], use_cache=False).logits
loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print("first step", loss.item(), flush=True)
"""


def time_to_line(command: list[str], sign: str, *, cwd: Path) -> float:
    """Seconds until a line that contains `sign` appears; the process is then ended."""
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)
    if process.stdout is None:
        raise SystemExit("no output to read")
    for line in process.stdout:
        if sign in line:
            seconds = time.perf_counter() - began_s
            process.terminate()
            process.wait()
            return seconds
    raise SystemExit(f"{command} ended without {sign!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.nproc))
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", str(options.nproc)] if options.nproc > 1 else []
        bare = [sys.executable, *ranks, str(script)]
        train = [sys.executable, "-m", "weft", "train", "--nproc", str(options.nproc)]
        seconds: dict[str, list[float]] = {"weft": [], "bare": []}
        for turn in range(options.repeat + 1):
            out = str(Path(folder) / f"run-{turn}")
            measured = {
                "bare": time_to_line(bare, "first step", cwd=Path(folder)),
                "weft": time_to_line([*train, "--out", out], "step 1/", cwd=Path(folder)),
            }
            if turn:  # the first turn fills the disk cache
                for name, value in measured.items():
                    seconds[name].append(value)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        print(f"{options.nproc} ranks: weft {medians['weft']:.2f} s, bare {medians['bare']:.2f} s,", end=" ")
        print(f"ratio {medians['weft'] / medians['bare']:.2f} (median of {options.repeat})")


if __name__ == "__main__":
    main()
