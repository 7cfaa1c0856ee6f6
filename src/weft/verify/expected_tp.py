"""Expected collectives of one-dimensional tensor parallelism per step, derived from the model's layout alone.

| per micro-batch        | forward                            | backward                       |
| ---------------------- | ---------------------------------- | ------------------------------ |
| region                 | all_reduce                         | all_reduce                     |
| … sequence parallel    | all_gather, reduce_scatter         | all_gather, reduce_scatter     |
| … of experts           | also gathers its routing weights   |                                |
| embedding              | all_reduce                         |                                |
| head                   | all_gather of logits, or the loss: 2 all_reduce | all_reduce        |
| … fused with its loss  | 2 all_reduce per chunk of logits   | all_reduce                     |
| sequence-parallel ends | all_gather (last block)            | all_gather (first block)       |

Once per step: an all_reduce for each group of ranks that share gradients. Recompute repeats a block's forward up to the
last tensor that its backward needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from weft.comm.observer import SMALL_ELEMENTS
from weft.core.mixture import block_policies
from weft.core.plan import Plan
from weft.engine.batch.rows import split_rows
from weft.engine.engine import Engine
from weft.engine.kernels.head_loss import token_chunks
from weft.engine.objective import Batch
from weft.engine.ownership import chunks_of
from weft.engine.pp.runtime import PipelineRuntime
from weft.engine.tp.context import TPContext
from weft.engine.tp.gradients import ALONE_ELEMENTS
from weft.models.tp.finder import text_config
from weft.models.tp.layout import Region, TensorLayout

ExpectedCollectives = dict[str, tuple[int, int]]  # (least, most) per step, by collective
LOOPED = frozenset({"hrm_text"})  # blocks run several times, as often as the config says
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"


@dataclass(frozen=True, kw_only=True)
class ExpectedTP:
    """Facts that determine a rank's tp traffic. `layout` is None for grids and looped blocks, which are not checked."""

    layout: TensorLayout | None
    is_loss_sharded: bool
    num_repeated: int  # blocks of this rank that are recomputed
    is_partly_frozen: bool
    shared_sums: int  # all-reduces of gradients that are partial sums
    kept: tuple[str, ...] = ()  # blocks that are not recomputed, where others are
    fused_sums: int | None = None  # all-reduces per step of a fused loss over a sharded head; None: not fused
    passes: Mapping[str, int] = field(default_factory=dict)  # forwards of regions that several blocks share, by name
    begins: bool = True  # the sequence-parallel blocks begin on this rank's stages
    ends: bool = True
    stages: int = 1  # of this rank: each of them reads the embedding, if it is here

    @staticmethod
    def of(engine: Engine, batch: Batch) -> ExpectedTP | None:
        """Call after a step, which shows whether the model's code accepts lazy logits. `batch`: one of this rank's."""
        tp, pp = TPContext.of(engine), PipelineRuntime.of(engine)
        if tp is None:
            return None
        kept = _kept(engine)
        return ExpectedTP(
            layout=None if _is_looped(engine) else tp.layout,
            is_loss_sharded=tp.token_loss is not None,
            fused_sums=_fused_sums(engine, batch),
            num_repeated=len(engine.layout.blocks) - len(kept),
            kept=kept,
            is_partly_frozen=any(not parameter.requires_grad for parameter in engine.model.parameters()),
            shared_sums=_shared_sums(engine) * (pp.updates_per_step if pp is not None else 1),
            passes=_passes(engine),
            begins=pp is None or pp.has_first,
            ends=pp is None or pp.has_loss,
            stages=len(pp.schedule_runner.stages.own) if pp is not None else 1,
        )

    def is_repeated(self, module: str) -> bool:
        """Whether a module's forward is recomputed."""
        return self.num_repeated > 0 and not f"{module}.".startswith(tuple(f"{block}." for block in self.kept))


def expected_of_tp(
    facts: ExpectedTP, layout: TensorLayout, plan: Plan, *, used: Collection[str]
) -> ExpectedCollectives:
    """(least, most) of every collective over the tp axis. `used`: the parameters that got a gradient."""
    is_stream = plan.tensor_parallel.sequence_parallel
    tally = _Tally(may_lack_backward=facts.is_partly_frozen)
    for region in layout.regions:
        tally.is_repeated = facts.is_repeated(region.name)
        if _is_used(region, used):
            for _ in range(facts.passes.get(region.name, 1)):
                _region(tally, region, is_stream=is_stream)
    if is_stream:
        for name in (name for name in layout.mixers if _has_used(f"{name}.", used)):
            tally.is_repeated = facts.is_repeated(name)
            tally.in_block(ALL_GATHER, 1)
            tally.backward(REDUCE_SCATTER, 1)
        tally.is_repeated = facts.num_repeated > 0
        tally.exits(ALL_GATHER, int(facts.ends))
        tally.backward(ALL_GATHER, int(facts.begins))
    # no backward needs the output of a block's last collective: recompute may skip it
    out = REDUCE_SCATTER if is_stream else ALL_REDUCE
    tally.least[out] = max(0, tally.least[out] - facts.num_repeated)
    _ends(tally, layout, facts)
    microbatches = plan.pipeline.microbatches
    expected = {name: (tally.least[name] * microbatches, tally.most[name] * microbatches) for name in tally.most}
    sums = facts.shared_sums + (facts.fused_sums or 0)
    return added(expected, {ALL_REDUCE: (sums, sums)})


def added(first: ExpectedCollectives, second: ExpectedCollectives) -> ExpectedCollectives:
    return {
        name: tuple(a + b for a, b in zip(first.get(name, (0, 0)), second.get(name, (0, 0)), strict=True))  # type: ignore[misc]
        for name in {**first, **second}
    }


class _Tally:
    """Least and most of each collective in one micro-batch."""

    def __init__(self, *, may_lack_backward: bool) -> None:
        self.least: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.is_repeated = False  # whether the current block is recomputed
        self._may_lack_backward = may_lack_backward

    @property
    def _times(self) -> int:
        return 2 if self.is_repeated else 1

    def forward(self, name: str, count: int) -> None:
        self.least[name] += count
        self.most[name] += count

    def in_block(self, name: str, least: int, most: int | None = None) -> None:
        """Count a collective of a block's forward, which recompute repeats."""
        self.least[name] += least * self._times
        self.most[name] += (least if most is None else most) * self._times

    def exits(self, name: str, count: int) -> None:
        """Count a collective at the end of a block: recompute may stop before it."""
        self.least[name] += count
        self.most[name] += count * self._times

    def backward(self, name: str, least: int, most: int | None = None) -> None:
        """Count a collective of the backward, which is missing where everything before it is frozen."""
        self.least[name] += 0 if self._may_lack_backward else least
        self.most[name] += least if most is None else most


def _is_used(region: Region, used: Collection[str]) -> bool:
    """Whether any parameter got a gradient: cross-attention without an encoder gets none."""
    names = (*(f"{linear.name}." for linear in region.linears), *(tensor.name for tensor in region.tensors))
    return _has_used(names, used)


def _has_used(prefix: str | tuple[str, ...], used: Collection[str]) -> bool:
    return any(name.startswith(prefix) for name in used)


def _region(tally: _Tally, region: Region, *, is_stream: bool) -> None:
    has_experts = region.kind == "experts"
    most = 2 if has_experts else 1  # hidden states; some experts also take their tokens' routing weights
    exits = sum(linear.side == "row" for linear in region.linears) + (region.leaves_at is not None)
    if is_stream:
        tally.in_block(ALL_GATHER, 1, most + has_experts)  # and the expert indices, which have no gradient
        tally.in_block(REDUCE_SCATTER, exits)
        tally.backward(REDUCE_SCATTER, 1, most)
        tally.backward(ALL_GATHER, exits)
    else:
        tally.in_block(ALL_REDUCE, exits)
        tally.backward(ALL_REDUCE, 1, most)
    for _ in region.wide_norms:  # a mean of squares, or a mean and a variance
        tally.in_block(ALL_REDUCE, 1, 2)
        tally.backward(ALL_REDUCE, 1, 2)


def _ends(tally: _Tally, layout: TensorLayout, facts: ExpectedTP) -> None:
    if layout.embedding is not None:
        tally.forward(ALL_REDUCE, facts.stages)
    if layout.head is not None:
        tally.backward(ALL_REDUCE, 1)
        if facts.is_loss_sharded and facts.fused_sums is None:
            tally.forward(ALL_REDUCE, 2)  # the largest logit; then the sum and the label's logit
        elif facts.fused_sums is None:
            tally.forward(ALL_GATHER, 1)


def _kept(engine: Engine) -> tuple[str, ...]:
    """This rank's blocks that are not recomputed."""
    activations, blocks = engine.plan.activations, engine.all_blocks
    policies = block_policies(activations.policy, activations.mixture, num_blocks=len(blocks))
    left_alone = {name for name, policy in zip(blocks, policies, strict=True) if policy == "none"}
    return tuple(name for name in engine.layout.blocks if name in left_alone)


def _fused_sums(engine: Engine, batch: Batch) -> int | None:
    fused = engine.head_loss
    if fused is None or fused.own is None or fused.full_logits_cause:
        return None
    pp = PipelineRuntime.of(engine)
    if pp is not None and not pp.has_loss:
        return 0
    sizes = [
        part["labels"].numel() for part in split_rows(batch, engine.plan.pipeline.microbatches, must_be_equal=False)
    ]
    chunks = sum(len(token_chunks(size, fused.own.most_tokens)) for size in sizes)
    return 2 * chunks  # the largest logit; then the sum and the label's logit


def _is_looped(engine: Engine) -> bool:
    return getattr(text_config(engine.model), "model_type", "") in LOOPED


def _passes(engine: Engine) -> dict[str, int]:
    """Names per module, where it has several: a shared block runs once per name."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in engine.model.named_modules(remove_duplicate=False):
        names[id(module)].append(name)
    return {of_one[0]: len(of_one) for of_one in names.values() if len(of_one) > 1}


def _shared_sums(engine: Engine) -> int:
    """All-reduces of partial gradients over the tp axis, without tiny ones: one per large chunk, one per group for
    the rest."""
    together: Counter[str] = Counter()
    alone = 0
    for name, parameter in engine.model.named_parameters():
        if not parameter.requires_grad or name not in engine.shards:
            continue
        groups = sorted({chunk.summed_over for chunk in engine.shards[name].chunks if chunk.summed_over is not None})
        together.update(groups[:1])  # one flag per parameter: whether the rank has a gradient
        for chunk in chunks_of(parameter, engine.shards[name]):
            if chunk.summed_over is not None and chunk.num_elements > ALONE_ELEMENTS:
                alone += 1
            elif chunk.summed_over is not None:
                together[chunk.summed_over] += chunk.num_elements
    return alone + sum(elements > SMALL_ELEMENTS for elements in together.values())
