"""The help of `weft`: verbs in groups, in the order of a project, and examples below each verb's options."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

GROUPS: dict[str, tuple[str, ...]] = {
    "Begin": ("new", "doctor"),
    "Plan": ("plan", "inference", "schedule", "dryrun"),
    "Train": ("train", "launch", "server", "verify"),
    "Look": ("ui", "report", "profile", "bench", "comm"),
    "Use": ("import", "export", "generate"),
}
OTHERS = "Other"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "new": ("weft new", "weft new run --out small.toml"),
    "doctor": ("weft doctor", "weft doctor --hosts a,b"),
    "plan": ("weft plan llama-3-8b --devices 8xH100-80GB", "weft plan run.toml --devices 2xCPU --out plan.toml"),
    "inference": ("weft inference llama-3-8b --devices H100",),
    "schedule": ("weft schedule 1f1b --stages 4 --microbatches 8",),
    "dryrun": ("weft dryrun run.toml --plan plan.toml --device H200",),
    "train": ("weft train", "weft train run.toml --plan plan.toml --nproc 4", "weft train --resume runs/first"),
    "launch": ("weft launch --on slurm --nodes 2 -- train run.toml --plan plan.toml",),
    "verify": (
        "weft verify run.toml --plan plan.toml --nproc 4",
        "weft verify --all",
        "weft verify --script train.py --nproc 2 -- --batch 8",
    ),
    "ui": ("weft ui runs",),
    "report": ("weft report runs/first",),
    "profile": ("weft profile run.toml --plan plan.toml", "weft profile runs/first --steps 2"),
    "import": ("weft import checkpoints/iter_0001000 my-model --config Llama-3.1-8B",),
    "export": ("weft export runs/first --out model",),
    "generate": ('weft generate runs/first --prompt "def main("',),
}


class GroupedHelp(TyperGroup):
    """Verbs by group; one that no group names comes last."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = {name: command for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))}
        shown = {name: command for name, command in shown.items() if not command.hidden}
        named = {name for names in GROUPS.values() for name in names}
        groups = {**GROUPS, OTHERS: tuple(name for name in shown if name not in named)}
        limit = formatter.width - 6 - max(map(len, shown))
        for title, names in groups.items():
            rows = [(name, shown[name].get_short_help_str(limit)) for name in names if name in shown]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=20)


def examples_of(verb: str) -> str | None:
    r"""The end of a verb's help; \b keeps its lines."""
    lines = EXAMPLES.get(verb)
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)]) if lines else None
