"""Expected sends and receives of a pipeline rank per step, message by message from its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.engine import Engine
from weft.engine.pp.no_flush_runner import NoFlushRunner
from weft.engine.pp.p2p import sent_by
from weft.engine.pp.runtime import PipelineRuntime
from weft.verify.expected_tp import ExpectedCollectives


@dataclass(frozen=True, kw_only=True)
class ExpectedP2P:
    """Messages of one rank in one step."""

    sends: int
    receives: int
    num_stages: int  # of this rank
    shared_weights: int  # gradients summed with another rank's copy
    updates: int  # per step

    @staticmethod
    def of(engine: Engine) -> ExpectedP2P | None:
        pipeline = PipelineRuntime.of(engine)
        if pipeline is None:
            return None
        runner = pipeline.schedule_runner
        place, schedule, ranks = runner.links.place, runner.schedule, runner.schedule.ranks
        if isinstance(runner, NoFlushRunner):  # a full step, without warm-up or drain
            ranks = runner.calls.actions(runner.calls.delay)
        targets = [
            (source, target)
            for source, actions in enumerate(ranks)
            for target, _ in sent_by(actions, schedule.stage_to_rank)
        ]
        return ExpectedP2P(
            sends=sum(source == place for source, _ in targets),
            receives=sum(target == place for _, target in targets),
            num_stages=len(runner.stages.own),
            shared_weights=len(pipeline.shared.names),
            updates=pipeline.updates_per_step,
        )

    def expected(self) -> ExpectedCollectives:
        counts = {"send": self.sends, "recv": self.receives, "all_reduce": self.shared_weights}
        return {name: (count, count) for name, count in counts.items()}
