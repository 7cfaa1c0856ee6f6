"""A step with optimizer offload on one GPU: weft without it, with the update on the device and on the host, and FSDP2.

    python benchmarks/offload_step.py --json offload.json --out benchmarks/results/offload_step-DATE-h200.md
    python benchmarks/offload_step.py --microbatches 4 --only device,host --set compile.enabled=true
    python benchmarks/offload_step.py --tiny                    # small and on a CPU: tries the code, measures nothing

Llama of 1.24 B parameters, 4 rows of 4096 tokens, bf16 compute, float32 weights and moments, AdamW, clipping to 1.0 in
every case. `staged` is the update on the device with `offload.staging_bytes`. `fsdp2` is fully_shard on one rank,
`fsdp2-offload` the same with CPUOffloadPolicy. Weft's steps are timed by device events without a wait between steps;
FSDP2's by the clock around steps that end with a wait for the device, as its host update waits anyway. Cases run one
after the other in this process, in turns with `--rounds`; each frees the memory of the last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.distributed as dist

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.train.bench import Bench, measure_engine

LLAMA: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {**LLAMA, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
CASES = ("none", "device", "staged", "host", "fsdp2", "fsdp2-offload")
# step / step of weft without offload at most; step of FSDP2's offload / step at least: by micro-batches
MOST = {1: 1.4, 4: 1.15}
LEAST = {1: 1.7, 4: 20.0}
Record = dict[str, Any]


def main() -> int:
    given = _arguments()
    device = torch.device("cpu") if given.tiny else torch.device("cuda", 0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    records: list[Record] = []
    for microbatches in given.microbatches:
        for case in given.only * given.rounds:
            began_s = time.perf_counter()
            record = {"case": case, "microbatches": microbatches, **_measured(case, microbatches, given, device)}
            record["elapsed_s"] = round(time.perf_counter() - began_s, 1)
            records.append(record)
            print(json.dumps(record), flush=True)
            _free(device)
    page = head(device) + table(medians(records))
    print("\n" + page)
    if given.json:
        given.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if given.out:
        given.out.write_text(page, encoding="utf-8")
    return int(any("error" in record for record in records))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--microbatches", type=lambda text: [int(one) for one in text.split(",")], default=[1, 4])
    parser.add_argument("--rounds", type=int, default=1, help="all cases in turns, so often")
    parser.add_argument("--staging-gb", type=float, default=8.0, help="of the case `staged`, in 1e9 bytes")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--slow-steps", type=int, default=2, help="timed steps of fsdp2-offload")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="in weft's plans; JSON")
    parser.add_argument("--json", type=Path, help="the records")
    parser.add_argument("--out", type=Path, help="the page")
    parser.add_argument("--tiny", action="store_true", help="small and on a CPU")
    return parser.parse_args()


def _measured(case: str, microbatches: int, given: argparse.Namespace, device: torch.device) -> Record:
    try:
        if case.startswith("fsdp2"):
            return fsdp2(microbatches, given, device, is_offloaded=case == "fsdp2-offload")
        return weft(case, microbatches, given, device)
    except Exception as error:  # one case's failure must not cost the others
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def weft(update: str, microbatches: int, given: argparse.Namespace, device: torch.device) -> Record:
    tables: dict[str, Any] = {"precision": {"preset": "bf16"}, "pipeline": {"microbatches": microbatches}}
    if update == "staged":
        staging = {"staging_bytes": int(given.staging_gb * 1e9)}
        tables["offload"] = {"optimizer": "cpu", "update": "device", **staging}
    elif update != "none":
        tables["offload"] = {"optimizer": "cpu", "update": update}
    for change in given.set:
        name, _, value = change.partition("=")
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = json.loads(value)
    rows, length = _batch(given)
    run = RunSpec.from_tables(
        {
            "model": {"type": "llama", "config": SMALL if given.tiny else LLAMA},
            "data": {"sequence_length": length},
            "train": {"global_batch": rows},
        }
    )
    bench = Bench(run=run, plan=Plan.from_tables(tables), device=device, steps=given.steps, warmup=given.warmup)
    timed, _, notes = measure_engine(bench)
    peaks = {"peak_allocated_bytes": timed.peak_allocated_bytes, "peak_reserved_bytes": timed.peak_reserved_bytes}
    return _record(timed.steps_s, timed.loss_last, notes=list(notes), kernels=timed.kernels, **peaks)


def fsdp2(microbatches: int, given: argparse.Namespace, device: torch.device, *, is_offloaded: bool) -> Record:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if is_offloaded else OffloadPolicy()
    config = LlamaConfig(**(SMALL if given.tiny else LLAMA), use_cache=False, attn_implementation="sdpa")
    with device:
        model = LlamaForCausalLM(config).float().train()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, config.vocab_size, _batch(given), device=device)
    is_slow = is_offloaded and microbatches > 1  # several seconds per step
    loss, steps_s = torch.zeros(()), []
    for number in range(1 + given.slow_steps if is_slow else given.warmup + given.steps):
        if number == (1 if is_slow else given.warmup) and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        began_s = time.perf_counter()
        for rows in tokens.chunk(microbatches):
            part = model(input_ids=rows, labels=rows).loss / microbatches
            part.backward()
            loss = part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        steps_s.append(time.perf_counter() - began_s)
    return _record(steps_s[1 if is_slow else given.warmup :], float(loss) * microbatches)


def _batch(given: argparse.Namespace) -> tuple[int, int]:
    return (4, 32) if given.tiny else (4, 4096)


def _record(steps_s: Any, loss: float, **more: Any) -> Record:
    is_cuda = torch.cuda.is_available()
    return {
        "step_s": statistics.median(steps_s),
        "steps_s": [round(seconds, 4) for seconds in steps_s],
        "loss": loss,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if is_cuda else 0,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else 0,
        **more,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- the page -------------------------------------------------------------------------------------------------------


def head(device: torch.device) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU: nothing is measured"
    cores = len(os.sched_getaffinity(0))
    return "\n".join(
        [
            f"# Optimizer offload, one step, {time.strftime('%Y-%m-%d')}",
            "",
            "Caveats first: one GPU, random weights and tokens, medians of a few steps; FSDP2's steps end with a wait.",
            "",
            f"Machine: {name}, {cores} cores. torch {torch.__version__}.",
            f"Command: `python {' '.join(sys.argv)}`",
            "",
            "",
        ]
    )


def medians(records: list[Record]) -> list[Record]:
    """One record per case and number of micro-batches: the median step of its rounds."""
    found: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        found.setdefault((record["case"], record["microbatches"]), []).append(record)
    merged = []
    for rounds in found.values():
        done = [record for record in rounds if "error" not in record] or rounds[:1]
        step_s = [statistics.median(record["step_s"] for record in done)] if "step_s" in done[0] else []
        merged.append({**done[0], **({"step_s": step_s[0]} if step_s else {})})
    return merged


def table(records: list[Record]) -> str:
    lines = [
        "| case | micro-batches | step, ms | of weft without offload | FSDP2's offload / it | peak, GiB | bars |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    steps = {(record["case"], record["microbatches"]): record.get("step_s") for record in records}
    for record in records:
        case, microbatches = record["case"], record["microbatches"]
        if "error" in record:
            lines.append(f"| {case} | {microbatches} | {record['error']} | | | | |")
            continue
        plain, slow = steps.get(("none", microbatches)), steps.get(("fsdp2-offload", microbatches))
        over = record["step_s"] / plain if plain else None
        under = slow / record["step_s"] if slow else None
        cells = [
            case, str(microbatches), f"{record['step_s'] * 1e3:.0f}", f"{over:.2f}x" if over else "",
            f"{under:.1f}x" if under else "", f"{record['peak_allocated_bytes'] / 2**30:.1f}",
            _bars(case, microbatches, over, under),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _bars(case: str, microbatches: int, over: float | None, under: float | None) -> str:
    if case not in ("device", "staged", "host") or microbatches not in MOST:
        return ""
    found = []
    if over:
        is_met = over <= MOST[microbatches]
        found.append(f"at most {MOST[microbatches]}x: {'met' if is_met else 'missed'}")
    if under:
        is_met = under >= LEAST[microbatches]
        found.append(f"at least {LEAST[microbatches]:g}x FSDP2: {'met' if is_met else 'missed'}")
    return "; ".join(found)


if __name__ == "__main__":
    raise SystemExit(main())
