"""`Engine`: one model under one plan. `step` trains on a batch, `evaluate` measures one, `save` and `load` checkpoint.

A step: count tokens over all ranks; for each micro-batch forward, loss sum / global count, backward; global gradient
norm by ownership; clip; optimizer. Batches are this rank's rows of the global batch, in order (see `share_of`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from weft.comm.groups import ensure_group, sum_over
from weft.core.executable import require_executable
from weft.core.masters import with_streamed_units
from weft.core.plan import Plan
from weft.core.plan_checks import require_consistent
from weft.core.records import EvalRecord, StepRecord
from weft.core.run_spec import RouterSpec
from weft.core.state_folder import StateFolder
from weft.core.terms import TimeTerm
from weft.engine.activations.dropout import seeded_forward, uses_randomness
from weft.engine.apply import apply_plan
from weft.engine.batch.packed_sequences import skip_packed_sequence_check
from weft.engine.batch.rows import num_rows, share_of_rows, split_rows, to_device
from weft.engine.buffers.sync import BufferSync
from weft.engine.engine_records import EngineRecords
from weft.engine.engine_state import EngineState
from weft.engine.evaluation import sum_losses
from weft.engine.kernels.attention import AttentionKernel
from weft.engine.kernels.cpu_matmul import patch_low_precision_matmul
from weft.engine.measure.dtypes import watch_dtypes
from weft.engine.measure.seen import seen
from weft.engine.measure.timer import StepTimer
from weft.engine.mesh import build_topology, select_device
from weft.engine.microbatches import SequentialRunner
from weft.engine.next_logits import last_logits
from weft.engine.objective import Batch, Objective, objective_for
from weft.engine.offload.offloaded import offload_states
from weft.engine.optim.clip import global_norm
from weft.engine.optim.for_plan import optimizer_for
from weft.engine.optim.group_rates import GroupRates, require_one_base
from weft.engine.optim.optimizers import OptimizerFactory, OptimizerPolicy
from weft.engine.ownership import LocalShards
from weft.engine.pending import PendingStep
from weft.engine.precision import LossScale, products_of, torch_dtype
from weft.engine.preference import PairObjective
from weft.engine.router.apply import with_router_of
from weft.engine.router.routers import tokens_of
from weft.engine.state import meta_read
from weft.engine.updates import Updates, divisor
from weft.models.initial import WeightSource
from weft.models.layout import describe


class Engine(EngineState, EngineRecords):
    """See the module. Keyword arguments beyond `optimizer` have defaults that suit a Hugging Face causal LM."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        optimizer: OptimizerPolicy | OptimizerFactory | str = "adamw",
        objective: Objective | None = None,
        seed: int = 0,
        clip_norm: float = 1.0,
        blocks: Sequence[str] | None = None,
        frozen: Sequence[str] = (),
        weights: WeightSource | None = None,
        router: RouterSpec | None = None,
        device: torch.device | str | None = None,
        state_folder: StateFolder | None = None,
    ) -> None:
        require_consistent(plan)
        require_executable(plan)
        plan, router_notes = with_router_of(model, with_streamed_units(plan))
        self.plan = plan
        self.device = select_device(device)
        if self.device.type == "cpu":
            patch_low_precision_matmul(torch_dtype(plan.precision.policy().weights))
        ensure_group(device_type=self.device.type)
        self.model, self.topology = model, build_topology(plan, device_type=self.device.type)
        applied = apply_plan(
            model,
            plan,
            self.topology,
            layout=describe(model, blocks=blocks),
            device=self.device,
            weights=weights,
            frozen=frozen,
            has_own_objective=objective is not None,
            reads_full_logits=objective is not None and not isinstance(objective, PairObjective),
            router=router,
        )
        self.layout, self.strategy, self.head_loss = applied.layout, applied.strategy, applied.head_loss
        self.all_blocks = applied.stages.split.blocks if applied.stages is not None else applied.layout.blocks
        self.axes, self.runner = applied.axes, applied.axes.runner() or SequentialRunner()
        self.float8, self.routers, self.inputs = applied.float8, applied.routers, applied.inputs
        self._notes = (*applied.layout.notes, *applied.notes, *router_notes)
        self.shards: LocalShards = self.axes.shards
        self.objective = objective or objective_for(model, self.axes.token_loss, applied.head_loss)
        if isinstance(objective, PairObjective):
            objective.bind(model, plan, self.axes.token_loss)
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.parameters = list(self.trained.values())
        self._seed, self.clip_norm = seed, clip_norm
        self.optimizer = optimizer_for(self, optimizer, seed=seed)
        self.offload = offload_states(
            self.optimizer, plan, model, self.layout, self.strategy, device=self.device, folder=state_folder
        )
        if applied.masters is not None and self.offload is not None:
            self.offload.fill(model, self.layout, applied.masters, shards=self.shards)
        self.commit_meta: Callable[[], dict[str, Any]] = dict  # what commits of states in files add to the scalars
        self.rates = GroupRates(self.optimizer)
        if callable(optimizer) and dist.get_world_size() > 1:
            require_one_base(self.rates, device=self.device)
        self.loss_scale = LossScale(enabled=plan.precision.policy().loss_scaling)
        self._products = products_of(plan, self.device)
        self.steps_done, self.is_updating = 0, False  # after the last backward of a step, until its end
        # Called with every reduced gradient, unscaled and before clipping, when set. It must not change them.
        self.on_gradients: Callable[[dict[str, torch.Tensor]], None] | None = None
        self._is_random = uses_randomness(model)
        self.attention = AttentionKernel(model, plan, self.device)
        self.updates = self.axes.updates(self) or Updates(self)
        norms = applied.batch_norms
        on: dict[str, Any] = {"device": self.device, "stages": applied.stages}
        self.buffer_sync = BufferSync(applied.changes, self.topology, batch_norms=norms.names, **on)
        self._dtypes = watch_dtypes(
            model,
            self.layout,
            plan,
            routers=self.routers.places,
            has_float8={"products": any(self.float8.values()), "gather": self.strategy.num_in_float8 > 0},
            activation_groups=[*self.axes.activation_groups, *([norms.group] if norms.group else [])],
        )
        model.train()
        if self.offload is not None and self.offload.memory.restored is not None:
            with meta_read():
                self.restore_scalars(self.offload.memory.restored["engine"])

    def step(self, batch: Batch, *, learning_rate: float | None = None) -> StepRecord:
        """Train on this rank's rows of a global batch. `learning_rate`: the first group's; others keep their ratio."""
        return self.step_nowait(batch, learning_rate=learning_rate).resolve()[0]

    def step_nowait(self, batch: Batch, *, learning_rate: float | None = None, vote_stop: bool = False) -> PendingStep:
        """As `step`, without waiting for the device; `vote_stop` is reduced with the loss, so all ranks see it."""
        timer = StepTimer(self.device)
        if learning_rate is not None:
            self.rates.set(learning_rate)
        with self._dtypes.watching(self._dtypes.is_incomplete), self._products(), self.float8.watching(self.steps_done):
            loss_sum, weight = self._forward_backward(to_device(batch, self.device), timer)
            norm, skipped = self.updates.finish_step()
        self.buffer_sync.after_step()
        self.inputs.finish_step()
        self.float8.finish_step(is_skipped=skipped)
        router = self.routers.finish_step(is_skipped=skipped)
        timer.mark(TimeTerm.OPTIMIZER)
        self.steps_done += 1
        if self.offload is not None:
            self.offload.memory.commit(self.steps_done, lambda: {"engine": self.scalars(), **self.commit_meta()})
        values, work = self.updates.gather_values(loss_sum, weight, norm, vote_stop=vote_stop)
        values, figures = self.updates.add_figures(values)
        return PendingStep(
            step=self.steps_done,
            learning_rate=self.rates.rate,
            values=values,
            figures=figures,
            work=work,
            timer=timer,
            skipped=skipped,
            loss_scale=self.loss_scale.value if self.loss_scale.enabled else None,
            router=router,
            float8=self.float8.figures,
        )

    def drain(self) -> None:
        """Finish the micro-batches in flight of a pipeline that never flushes. Collective; a no-op in other layouts."""
        self.updates.drain()

    def _forward_backward(self, batch: Batch, timer: StepTimer) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the summed loss over the global weight; returns this rank's sum and the global weight."""
        microbatches = self.split(batch)
        self.attention.choose(microbatches[0])
        chunks = [num_rows(part) // self.axes.row_chunks for part in microbatches]
        begins = itertools.accumulate(map(num_rows, microbatches), initial=self.topology.dp_rank * num_rows(batch))
        first_rows = [begin + self.axes.row_chunk * chunk for begin, chunk in zip(begins, chunks, strict=False)]
        weights = self._weights(batch, microbatches)
        factors = self.loss_scale.value / divisor(weights)
        total = torch.zeros((), device=self.device)

        def forward(stage: int, index: int) -> torch.Tensor:
            self.routers.begin_microbatch()
            self.inputs.begin_forward()
            seeded = seeded_forward(
                seed=self._seed,
                step=self.steps_done,
                first_row=first_rows[index],
                num_rows=chunks[index],
                is_random=self._is_random,
                slices=self.axes.slices_of(microbatches[index]),
            )
            with seeded, self.buffer_sync.forward(stage):
                loss_sum = self.loss_sum(microbatches[index], stage=stage)
            total.add_(loss_sum.detach())
            return loss_sum * factors[index if len(factors) > 1 else 0]

        self.runner.train(forward, microbatches, self.strategy, timer, self.updates.begin_step())
        self.guard.see_loss(total, weights)
        return total, weights.sum()

    def _weights(self, batch: Batch, microbatches: Sequence[Batch]) -> torch.Tensor:
        """The divisors of losses, over all ranks: tokens per update. Most layouts make one update per step."""
        own = [self.objective.weight(part) for part in self.updates.batches_by_update(batch, microbatches)]
        tokens = tokens_of(batch)
        own.append(own[0].new_full((), tokens.numel()))  # no copy from the host, which would wait for a GPU
        summed = sum_over(torch.stack(own).to(self.device), self.topology.dp_group)
        length = tokens.shape[-1] if tokens.ndim > 1 else 1
        self.routers.begin_step(summed[-1], sequence_length=length, loss_scale=self.loss_scale.value)
        return summed[:-1]

    def loss_sum(self, microbatch: Batch, *, stage: int = 0, objective: Objective | None = None) -> torch.Tensor:
        """The summed loss of this rank's rows, by the engine's objective or another. Stages other than the last end
        early (`StageDone`)."""
        module = self.runner.callable_for(self.strategy.module, stage)
        around = self.axes.around_forward(self.model)
        with around, skip_packed_sequence_check(microbatch), self.attention.preferred():
            loss = (objective or self.objective).loss_sum(module, self.axes.rows_of(microbatch))
        seen("loss", loss.dtype)
        return loss

    def show_gradients(self) -> None:
        if self.on_gradients is None:
            return
        named, scale = self.model.named_parameters(), self.loss_scale.value
        with self._dtypes.pause():
            self.on_gradients({name: value.grad / scale for name, value in named if value.grad is not None})

    def gradient_norm(self, *, of_stage: bool = False) -> torch.Tensor:
        return global_norm(
            self.trained,
            self.topology,
            shards=self.shards,
            not_counted=self.layout.copies,
            partitioning=() if of_stage else self.axes.partitioning,
            device=self.device,
        )

    def look_at_dtypes(self) -> None:
        """After an update, before its gradients are freed; the first time only."""
        if self._dtypes.is_incomplete:
            self._dtypes.look_at(self.parameters, self.optimizer, self.masters)

    def evaluate(self, batches: Batch | Sequence[Batch]) -> EvalRecord:
        """The mean token loss over one batch or several, by the same objective and division as training."""
        loss_sum, weight = self.evaluate_nowait(batches)
        return EvalRecord(loss=float(loss_sum / divisor(weight)), tokens=int(weight))

    def evaluate_nowait(self, batches: Batch | Sequence[Batch]) -> torch.Tensor:
        """The sum of token losses and the number of tokens, over all ranks; both may still be on the device."""
        self.drain()
        with self._products():
            return sum_losses(self, batches)

    def next_logits(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The logits of the token after the first `lengths[i]` tokens of row i, in float32, equal on all ranks.

        `ids` is the same on all ranks. Not in pipelines, with context parallelism and on grids. Collective."""
        self.drain()
        with self._products():
            return last_logits(self, ids, lengths)

    def close(self) -> None:
        """Destroy this engine's process groups; it cannot train any more. Collective; the second call is a no-op."""
        self.updates.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # collectives in flight need their groups
        self.topology.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:  # after an error the other ranks may never reach this collective
            self.close()

    def share_of(self, global_batch: Batch) -> dict[str, torch.Tensor]:
        """This rank's rows of a batch that every rank holds in full."""
        return share_of_rows(global_batch, rank=self.topology.dp_rank, degree=self.topology.dp_degree)

    def split(self, batch: Batch) -> list[dict[str, torch.Tensor]]:
        return split_rows(batch, self.plan.pipeline.microbatches, must_be_equal=self.axes.row_chunks > 1)
