"""Digests of curves, gradients and checkpoints of many layouts: the same bits before and after a refactoring?

    python benchmarks/layout_digests.py --out before.json          # in the old tree
    python benchmarks/layout_digests.py --compare before.json      # in the new tree, on the same machine

Every case trains four steps of a tiny model and evaluates it. `curve` is a digest of the bits of losses and norms,
`gradients` of the first step's reduced gradients on every rank, `checkpoint` of the names and bytes of all tensors that
`Engine.save` wrote, read back by torch's own tool. Uses public names of weft alone. Digests depend on processor and
torch, so only two runs on one machine can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROTARY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **ROTARY},
    "qwen3, tied": {"model_type": "qwen3", **ROTARY, "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 257
    },
    "mixtral": {"model_type": "mixtral", **ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3, fused projections": {"model_type": "phi3", **ROTARY, "pad_token_id": 0},
}  # fmt: skip


def pipeline(schedule: str, *, virtual_stages: int = 1, microbatches: int = 4, pp: int = 2, **others: Any) -> Any:
    table = {"schedule": schedule, "microbatches": microbatches, "virtual_stages": virtual_stages}
    return {"mesh": {"pp": pp, **others.pop("mesh", {})}, "pipeline": table, **others}


PLANS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": {},
        "one, in four": {"pipeline": {"microbatches": 4}},
        "one, recomputed": {"activations": {"policy": "full"}},
        "one, selective": {"activations": {"policy": "selective"}},
        "one, bf16": {"precision": {"preset": "bf16"}},
        "one, fp16": {"precision": {"preset": "fp16"}},
    },
    2: {
        "ddp": {"mesh": {"dp_replicate": 2}},
        **{f"zero-{stage}": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": stage}} for stage in (1, 2, 3)},
        "zero-3, bf16, in two, recomputed": {
            "mesh": {"dp_shard": 2},
            "data_parallel": {"zero": 3},
            "precision": {"preset": "bf16"},
            "pipeline": {"microbatches": 2},
            "activations": {"policy": "full"},
        },
        "tp": {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False, "loss_parallel": False}},
        "tp, sequence": {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True, "loss_parallel": False}},
        "tp, sequence, loss": {
            "mesh": {"tp": 2},
            "tensor_parallel": {"sequence_parallel": True, "loss_parallel": True},
        },
        **{name: pipeline(name) for name in ("naive", "gpipe", "1f1b", "zero_bubble", "pipedream", "pipedream_2bw")},
        **{name: pipeline(name, virtual_stages=2) for name in ("interleaved_1f1b", "looped_bfs", "zbv", "dualpipev")},
        "1f1b, recomputed": pipeline("1f1b", activations={"policy": "full"}),
    },
    4: {
        "hsdp": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
        "hsdp, zero-1": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 1}},
        "tp x zero-3": {"mesh": {"tp": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
        "tp x ddp": {"mesh": {"tp": 2, "dp_replicate": 2}},
        "pp x tp": pipeline("1f1b", mesh={"tp": 2}),
        "pp x zero-2": pipeline("1f1b", mesh={"dp_shard": 2}, data_parallel={"zero": 2}),
        "zbv x zero-1": pipeline("zbv", virtual_stages=2, mesh={"dp_shard": 2}, data_parallel={"zero": 1}),
        "2d": {"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}},
    },
    8: {
        "2.5d": {"mesh": {"tp": 8}, "tensor_parallel": {"mode": "2.5d"}},
        "3d": {"mesh": {"tp": 8}, "tensor_parallel": {"mode": "3d"}},
        "pp x tp x zero-3": pipeline("1f1b", mesh={"tp": 2, "dp_shard": 2}, data_parallel={"zero": 3}),
    },
}


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.hexdigest()[:16]


def tensor_bytes(tensor: Any) -> bytes:
    import torch

    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bytes(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def run_case(model: str, plan: dict[str, Any], folder: Path) -> dict[str, str]:
    """One case on this rank; the digests of `checkpoint` are rank 0's."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    import weft

    torch.manual_seed(0)
    fields = dict(MODELS[model])
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    engine = weft.Engine(module, weft.Plan.from_tables(plan), device="cpu")
    gradients: list[bytes] = []

    def keep(found: dict[str, Any]) -> None:
        if not gradients:
            for name in sorted(found):
                gradients.extend((name.encode(), tensor_bytes(found[name])))

    engine.on_gradients = keep
    curve = []
    for step in range(4):
        tokens = torch.randint(0, 256, (16, 17), generator=torch.Generator().manual_seed(1000 + step))
        labels = tokens[:, 1:].clone()
        labels[0, :8] = -100
        batch = engine.share_of({"input_ids": tokens[:, :-1].contiguous(), "labels": labels})
        record = engine.step(batch, learning_rate=1e-3)
        curve += [record.loss.hex(), record.grad_norm.hex()]
    curve.append(engine.evaluate([batch]).loss.hex())
    engine.save(folder)
    found = {"curve": digest(line.encode() for line in curve), "gradients": digest(gradients)}
    if dist.get_rank() == 0:
        found["checkpoint"] = digest_checkpoint(folder)
    engine.close()
    return found


def digest_checkpoint(folder: Path) -> str:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    newest = max(path.parent for path in folder.rglob(".metadata"))
    dcp_to_torch_save(newest, folder / "all.pt")
    tensors = torch.load(folder / "all.pt", weights_only=False)
    flat = dict(sorted(_flat(tensors)))
    return digest(part for name, value in flat.items() for part in (name.encode(), tensor_bytes(value)))


def _flat(tree: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif hasattr(tree, "numpy"):
        yield prefix, tree


def run_rank(world_size: int, folder: Path) -> None:
    import torch.distributed as dist

    import weft

    process = weft.join(device_type="cpu")
    results = {}
    for model in MODELS:
        for name, plan in PLANS[world_size].items():
            place = folder / f"{model}-{name}".replace(" ", "_").replace(",", "")
            try:
                found = run_case(model, plan, place)
            except weft.WeftError as error:  # refused alike on every rank, before any collective
                found = {"refused": f"{error.code} {error.message}"}
            ranks: list[Any] = [None] * world_size
            dist.all_gather_object(ranks, found)
            results[f"{model} | {name}"] = {
                "curve": digest(one.get("curve", "").encode() for one in ranks),
                "gradients": digest(one.get("gradients", "").encode() for one in ranks),
                **{key: value for key, value in found.items() if key in ("checkpoint", "refused")},
            }
    weft.leave()
    if process.is_main:
        (folder / "results.json").write_text(json.dumps(results))


def run_world(world_size: int) -> dict[str, dict[str, str]]:
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank-of", str(world_size), "--folder", folder],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world_size)
        ]
        if any(rank.wait() for rank in ranks):
            raise SystemExit(f"a rank of {world_size} failed")
        found: dict[str, dict[str, str]] = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
        return found


def differences(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """One line per case that differs or is missing on either side."""
    lines = [f"{case}: only before" for case in before.keys() - now.keys()]
    lines += [f"{case}: only now" for case in now.keys() - before.keys()]
    for case in sorted(before.keys() & now.keys()):
        keys = sorted(before[case].keys() | now[case].keys())
        if changed := [key for key in keys if before[case].get(key) != now[case].get(key)]:
            lines.append(f"{case}: {', '.join(changed)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=sorted(PLANS), help="world sizes")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        return run_rank(options.rank_of, options.folder)
    found = {case: digests for size in options.ranks for case, digests in run_world(size).items()}
    refused = [case for case, digests in found.items() if "refused" in digests]
    print(f"{len(found)} cases, {len(refused)} refused: {', '.join(refused) or 'none'}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.compare:
        before = json.loads(options.compare.read_text(encoding="utf-8"))
        lines = differences(
            {case: value for case, value in before.items() if case in found or not options.ranks}, found
        )
        print("\n".join(lines) or "all the same bits")
        raise SystemExit(bool(lines))
    return None


if __name__ == "__main__":
    main()
