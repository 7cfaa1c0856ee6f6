"""Causal attention of each context-parallel rank, for both splits of a row."""

from __future__ import annotations

from typing import get_args

from weft.core.sequence_split import SequenceSplit, work_over_mean
from weft.report.chart import Chart, stack_figure, stack_legend
from weft.report.fields import count, table, word
from weft.report.folder import TrainingFolder


def draw_attention_work(folder: TrainingFolder) -> Chart | None:
    """Pairs of a query and a key over the mean of the ranks; None where every rank has whole rows or all positions."""
    degree = count(table(folder.plan, "mesh").get("cp"))
    length = count(table(folder.run, "data").get("sequence_length"))
    policy = table(folder.plan, "context_parallel")
    if degree is None or length is None or degree < 2 or word(policy.get("attention")) == "ulysses":
        return None
    splits: tuple[SequenceSplit, ...] = get_args(SequenceSplit)
    group = count(policy.get("ulysses")) or 1
    work = {str(split): work_over_mean(length, degree=degree, split=split, group=group) for split in splits}
    figure = stack_figure(
        [str(rank) for rank in range(degree)], work, title="over the mean", show="{:.3f}".format, bar_title="rank"
    )
    figure.layout["barmode"] = "group"
    used = word(policy.get("split")) or splits[0]
    most = ", ".join(f"{max(shares):.3f} with {split}" for split, shares in work.items())
    caption = (
        f"Pairs of causal attention over whole rows of {length:,} positions; this run splits them {used}. The busiest"
        f" rank has {most}. Windows and documents need fewer."
    )
    title = "Attention work per context-parallel rank"
    return Chart(key="attention-work", title=title, caption=caption, figure=figure, legend=stack_legend(work))
