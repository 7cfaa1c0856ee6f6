"""Low-rank adapters against PEFT: losses and gradients of ten steps from the same factors, and the exported folder.

    python benchmarks/lora_peft.py weft FOLDER        weft's side, in weft's environment
    PEER/bin/python benchmarks/lora_peft.py peft FOLDER   PEFT's side, in one with torch, transformers and peft

The second prints one row per family. FOLDER has, per family, a base, the first adapter, batches and what weft found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

STEPS, ROWS, LENGTH, RATE, DECAY, BETAS = 10, 4, 32, 1e-2, 0.1, (0.9, 0.95)
ROTARY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "qwen2": ROTARY,  # biases beside
    "gpt2": {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "mixtral": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def batches() -> list[torch.Tensor]:
    draws = (torch.Generator().manual_seed(100 + step) for step in range(STEPS))
    return [torch.randint(0, 257, (ROWS, LENGTH + 1), generator=generator) for generator in draws]


def of_weft(folder: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from weft.core.plan import Plan
    from weft.core.run_spec import RunSpec
    from weft.engine.engine import Engine
    from weft.engine.optim.optimizers import OptimizerPolicy
    from weft.models.adapter.build import run_skeleton
    from weft.models.adapter.lora import factor_names
    from weft.models.adapter.peft_folder import write_peft_folder
    from weft.models.build import build_config
    from weft.train.build import weight_source

    base = folder / "base"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family])).save_pretrained(base)
    run = RunSpec.from_tables({"model": {"path": str(base)}, "adapter": {"kind": "lora", "rank": 8, "alpha": 16}})
    config = build_config(run.model, vocab_size=257)
    weights, _ = weight_source(run, config, device=torch.device("cpu"))
    policy = OptimizerPolicy(learning_rate=RATE, weight_decay=DECAY, betas=BETAS)
    skeleton = run_skeleton(run, config)
    with Engine(skeleton, Plan(), optimizer=policy, weights=weights, clip_norm=0.0, device="cpu") as engine:
        names = factor_names(engine.model)

        def write(to: Path) -> None:
            factors = {name: engine.model.get_parameter(name).detach().clone() for name in names}
            write_peft_folder(to, factors, run.adapter, base=str(base), is_transposed=family == "gpt2")

        write(folder / "first")
        found: dict[str, torch.Tensor] = {}
        losses = []
        for step, tokens in enumerate(batches()):
            engine.on_gradients = lambda gradients, step=step: found.update(  # type: ignore[misc]
                {f"{step}.{name}": value.detach().clone() for name, value in gradients.items()}
            )
            batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
            losses.append(engine.step(batch).loss)
        write(folder / "last")
        engine.model.eval()
        with torch.no_grad():
            found["logits"] = engine.model(input_ids=batches()[0]).logits
    save_file(found, folder / "weft.safetensors")
    (folder / "weft.json").write_text(json.dumps(losses))


def of_peft(folder: Path, family: str) -> dict[str, float]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, found = folder / "base", load_file(folder / "weft.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, folder / "first", is_trainable=True)
    trained = {name.removeprefix("base_model.model.").replace(".default", ""): parameter
               for name, parameter in model.named_parameters() if parameter.requires_grad}  # fmt: skip
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, betas=BETAS, weight_decay=DECAY)
    losses, worst = json.loads((folder / "weft.json").read_text()), 0.0
    gaps = []
    model.train()
    for step, tokens in enumerate(batches()):
        logits = model(input_ids=tokens[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.sqrt(sum(parameter.grad.double().square().sum() for parameter in trained.values()))
        if {f"{step}.{name}" for name in trained} != {name for name in found if name.startswith(f"{step}.")}:
            raise SystemExit(f"{family}: PEFT trains other parameters")
        for name, parameter in trained.items():
            gap = (parameter.grad.double() - found[f"{step}.{name}"].double()).norm() / norm
            worst = max(worst, float(gap))
        gaps.append(abs(loss.item() - losses[step]))
        optimizer.step()
        optimizer.zero_grad()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, folder / "last").eval()
    with torch.no_grad():
        right = loaded(input_ids=batches()[0]).logits
        merged = loaded.merge_and_unload()(input_ids=batches()[0]).logits
    return {
        "factors": len(trained),
        "first loss": losses[0],
        "last loss": losses[-1],
        "loss, largest difference": max(gaps),
        "gradient, largest difference of its norm": worst,
        "logits of the exported adapter": float((right - found["logits"]).abs().max()),
        "logits merged by PEFT": float((merged - found["logits"]).abs().max()),
    }


def main() -> None:
    side, folder = sys.argv[1], Path(sys.argv[2])
    for family in FAMILIES:
        (folder / family).mkdir(parents=True, exist_ok=True)
        if side == "weft":
            of_weft(folder / family, family)
        else:
            print(family, json.dumps(of_peft(folder / family, family)))


if __name__ == "__main__":
    main()
