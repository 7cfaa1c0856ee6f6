"""The step of another trainer, timed on one GPU: torchtitan, accelerate, Lightning, plain loops of HF and FSDP2.

    python benchmarks/gpu_peers.py --peer torchtitan --shape llama-3-8b --rows 2 --sequence 8192 --float8 \
        --recompute selective --json
    python benchmarks/gpu_peers.py --peer eager --config-json CONFIG.json --rows 4 --sequence 4096 --json
    python benchmarks/gpu_peers.py --peer accelerate --tiny          # small, on a CPU: tries the code, measures nothing

| peer       | what runs                                                                                           |
| ---------- | --------------------------------------------------------------------------------------------------- |
| eager      | the HF model, bf16 autocast over fp32 weights, torch's default AdamW                                |
| accelerate | the same model and optimizer through `Accelerator(mixed_precision="bf16")`                          |
| lightning  | the same in a `LightningModule`, `precision="bf16-mixed"`                                           |
| fsdp2      | the same, blocks and root through `fully_shard`, bf16 compute, fp32 reduce; rank 0 of 8             |
| torchtitan | its own model, compile, float8 and recompute (gpu_titan.py); rank 0 of 8                            |

Rank 0 of 8 is alone: its collectives are copies in its own memory (weft.comm.loopback), the network takes no time.
Every peer: random weights, random tokens of one seed in four batches that are on the device already, AdamW (0.9, 0.95,
decay 0.1) and a clip to 1.0 in every step. Steps are timed by CUDA events with no wait of the host between them and no
garbage collection; peaks are the allocator's since the end of the warm-up. `first_step_s` has the compilation in it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch reads them; a test that imports this file keeps its own
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # gpu_step.py gives weft the same
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from dryrun_cases import shrunk
from gpu_cases import SHAPES, TINY_ROWS, TINY_SEQUENCE
from gpu_recorder import Recorder
from gpu_titan import FAMILIES, NUM_RANKS, titan_step

from weft.comm.loopback import loopback_world

Step = Callable[[int], torch.Tensor]  # the number of the step -> its loss, still on the device

PACKAGES = {
    "torchtitan": ("torchtitan", "torchao"),
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("pytorch-lightning", "transformers"),
    "eager": ("transformers",),
    "fsdp2": ("transformers",),
}
NUM_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained and for how long; `config` is an HF config's own keys with its `model_type`."""

    peer: str
    config: dict[str, Any]
    rows: int
    sequence: int
    float8: bool = False
    recompute: str = "none"
    ep: int = 1
    attention: str = "sdpa"
    experts: str | None = None
    steps: int = 8
    warmup: int = 3
    tiny: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.tiny else torch.device("cuda", 0)

    @property
    def num_tokens(self) -> int:
        return self.rows * self.sequence

    def recorder(self) -> Recorder:
        return Recorder(self.device, warmup=self.warmup, steps=self.steps)


def main() -> int:
    given = _arguments()
    case = _case(given)
    with contextlib.redirect_stdout(sys.stderr):  # trainers talk; the answer is alone on stdout
        try:
            found = measure(case)
        except torch.OutOfMemoryError as error:
            found = {"peer": case.peer, "error": "out of memory: " + str(error).partition(". GPU")[0]}
        except ModuleNotFoundError as error:
            found = {"peer": case.peer, "error": f"{error.name} is not installed here"}
    print(json.dumps(found) if given.json else _brief(found))
    return 1 if "error" in found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", required=True, choices=sorted(PACKAGES))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument(
        "--config-json", type=Path, help="a file with an HF config, its model_type in it; not torchtitan"
    )
    parser.add_argument("--rows", type=int, default=4, help="sequences a step on this rank")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens a row")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa", help="of the HF model")
    parser.add_argument(
        "--experts", choices=["eager", "grouped_mm"], help="of the HF model: how it multiplies by experts"
    )
    parser.add_argument("--float8", action="store_true", help="tensor-wise, gathered in float8; torchtitan only")
    parser.add_argument("--recompute", choices=["none", "selective"], default="none", help="torchtitan only")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks of the 8; torchtitan only")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, at least 1")
    parser.add_argument("--tiny", action="store_true", help="small and on a CPU")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a line to read")
    given = parser.parse_args()
    if min(given.steps, given.warmup, given.rows) < 1 or given.sequence < 2:
        parser.error("--steps, --warmup and --rows are at least 1, --sequence at least 2")
    if given.peer != "torchtitan" and (given.float8 or given.ep > 1 or given.recompute != "none"):
        parser.error("--float8, --ep and --recompute are torchtitan's")
    if given.peer == "torchtitan" and (given.config_json or SHAPES[given.shape]["model_type"] not in FAMILIES):
        parser.error(f"torchtitan has its own models: give --shape of {', '.join(FAMILIES)}")
    if given.config_json and not given.config_json.is_file():
        parser.error(f"there is no file {given.config_json}")
    if not given.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here: --tiny tries the code on a CPU")
    return given


def _case(given: argparse.Namespace) -> Case:
    config = SHAPES[given.shape]
    if given.config_json:
        config = json.loads(given.config_json.read_text(encoding="utf-8"))
    rows, sequence = given.rows, given.sequence
    if given.tiny:
        config, rows, sequence = shrunk(config), TINY_ROWS, TINY_SEQUENCE
    return Case(
        peer=given.peer, config=config, rows=rows, sequence=sequence, float8=given.float8, recompute=given.recompute,
        ep=given.ep, attention=given.attention, experts=given.experts, steps=given.steps, warmup=given.warmup,
        tiny=given.tiny,
    )  # fmt: skip


# --- the measurement ------------------------------------------------------------------------------------------------


def measure(case: Case) -> dict[str, Any]:
    if case.device.type == "cuda":
        torch.cuda.set_device(case.device)
        torch.set_float32_matmul_precision("high")  # what autocast leaves in fp32 shall not be the peer's handicap
    figures = lightning_figures(case) if case.peer == "lightning" else loop_figures(case)
    return {
        "peer": case.peer,
        "rows": case.rows,
        "sequence": case.sequence,
        "float8": case.float8,
        "recompute": case.recompute,
        **figures,
        "versions": versions(case.peer),
    }


def loop_figures(case: Case) -> dict[str, Any]:
    with ExitStack() as stack:
        if case.peer in ("fsdp2", "torchtitan"):
            stack.enter_context(loopback_world(num_ranks=NUM_RANKS))
        step = STEPS[case.peer](case)
        if case.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # what building took and gave back is not the step's
        recorder = case.recorder()
        for index in range(case.warmup + case.steps):
            recorder.before(index)
            recorder.keep_loss(index, step(index))
        recorder.before(case.warmup + case.steps)
        return recorder.figures(case.num_tokens)


def versions(peer: str) -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in ("torch", *PACKAGES[peer])}
    found["torch"] = torch.__version__
    found["python"] = platform.python_version()
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return found


def _brief(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['peer']}: {found['error']}"
    gib = found["peak_allocated_bytes"] / 2**30
    return (
        f"{found['peer']}: {found['tokens_per_s']:,.0f} tokens/s, step {found['step_s'] * 1e3:.1f} ms, "
        f"peak {gib:.1f} GiB, loss {found['loss_first']:.3f} to {found['loss_last']:.3f}"
    )


# --- the peers ------------------------------------------------------------------------------------------------------


def hf_model(case: Case) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**case.config, use_cache=False)
    kernels = {"attn_implementation": case.attention}
    if case.experts:
        kernels["experts_implementation"] = case.experts
    with case.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **kernels)
    trained: torch.nn.Module = model.train()
    return trained


def token_batches(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator(device=case.device).manual_seed(1)
    shape, vocabulary = (case.rows, case.sequence), case.config["vocab_size"]
    return [torch.randint(0, vocabulary, shape, device=case.device, generator=generator) for _ in range(NUM_BATCHES)]


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """What `torch.optim.AdamW` does when not told how."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)


def plain_loop(case: Case, model: torch.nn.Module, batches: list[torch.Tensor], *, autocast: bool) -> Step:
    """Forward, backward, clip, update: what people write."""
    optimizer = adamw(model)

    def step(index: int) -> torch.Tensor:
        tokens = batches[index % NUM_BATCHES]
        with torch.autocast(case.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def eager_step(case: Case) -> Step:
    return plain_loop(case, hf_model(case), token_batches(case), autocast=True)


def accelerate_step(case: Case) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=case.device.type == "cpu")
    bare, batches = hf_model(case), token_batches(case)
    model, optimizer = accelerator.prepare(bare, adamw(bare))

    def step(index: int) -> torch.Tensor:
        tokens = batches[index % NUM_BATCHES]
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2_step(case: Case) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, batches = hf_model(case), token_batches(case)
    mesh = init_device_mesh(case.device.type, (NUM_RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.get_submodule("model.layers").children(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return plain_loop(case, model, batches, autocast=False)


def torchtitan_step(case: Case) -> Step:
    return titan_step(
        case.config, token_batches(case), float8=case.float8, recompute=case.recompute, ep=case.ep, tiny=case.tiny
    )


STEPS = {"eager": eager_step, "accelerate": accelerate_step, "fsdp2": fsdp2_step, "torchtitan": torchtitan_step}


def lightning_figures(case: Case) -> dict[str, Any]:
    """Its loop is its own: the recorder listens to it. One step more than timed, whose beginning is the last mark."""
    import logging
    import warnings

    import pytorch_lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")  # advice on workers and logging
    model, batches, recorder = hf_model(case), token_batches(case), case.recorder()
    num_steps = case.warmup + case.steps + 1

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, tokens: torch.Tensor, index: int) -> Any:
            return self.model(input_ids=tokens, labels=tokens).loss

        def on_train_batch_start(self, tokens: torch.Tensor, index: int) -> None:
            recorder.before(index)

        def on_train_batch_end(self, outputs: Any, tokens: torch.Tensor, index: int) -> None:
            recorder.keep_loss(index, outputs["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    trainer = pytorch_lightning.Trainer(
        max_steps=num_steps, precision="bf16-mixed", gradient_clip_val=1.0, devices=1,
        accelerator="cpu" if case.device.type == "cpu" else "gpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    feed = torch.utils.data.DataLoader([batches[index % NUM_BATCHES] for index in range(num_steps)], batch_size=None)
    trainer.fit(Module(), feed)
    return recorder.figures(case.num_tokens)


if __name__ == "__main__":
    sys.exit(main())
