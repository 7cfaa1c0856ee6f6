"""Loss curves of presets of formats on text, beside that of bf16: the same run, data and seed, 500 steps.

    python benchmarks/preset_curves.py [--steps 500] [--presets bf16 deepseek-v3] [--set section.key=value]...

Prints the mean loss of the last tenth of the steps, and the largest difference of means over windows of a tenth.
"""

from __future__ import annotations

import argparse
from statistics import fmean

from trained import metrics_of

MODEL = "{hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2}"
SETTINGS = {
    "model.config": MODEL,
    "data.sequence_length": 64,
    "train.global_batch": 8,
    "train.learning_rate": 1e-3,
    "evaluation.every": 0,
    "logging.tensorboard": "false",
    "ledger.dry_run": "false",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--presets", nargs="+", default=["bf16", "deepseek-v3"])
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    given = SETTINGS | {"train.steps": options.steps} | dict(one.split("=", 1) for one in options.settings)
    tenth, base = options.steps // 10, None
    for preset in options.presets:
        lines = metrics_of(preset, {**given, "precision.preset": preset})
        means = [fmean(line["loss"] for line in lines[at : at + tenth]) for at in range(0, options.steps, tenth)]
        base = base or means
        apart = [mean / other - 1 for mean, other in zip(means, base, strict=True)]
        print(
            f"{preset:12} last tenth {means[-1]:.4f} ({apart[-1]:+.2%}), largest difference {max(apart, key=abs):+.2%}",
            " ".join(f"{mean:.3f}" for mean in means),
            flush=True,
        )


if __name__ == "__main__":
    main()
