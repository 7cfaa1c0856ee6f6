"""Parameters that the loss does not depend on: no failure of a layout, but named; a gradient that is lost stays one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmark_folder import benchmarks_importable
from gloo_ranks import run_ranks
from samples import by_default
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from verify_ranks import Tables, mutated_verdicts_in_rank, open_session, small_run, verdicts_of_many_in_rank

from weft.core.errors import PlanError
from weft.core.plan import Plan
from weft.engine.updates import Updates

with benchmarks_importable():
    import tiny_families

EXPERTS = {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}}
REPLICAS = {"mesh": {"dp_replicate": 2}, "data_parallel": {"find_unused_parameters": True}}
UNTRAINED = [f"model.layers.{block}.indexer" for block in range(2)]
LIMIT_S = 600


@contextmanager
def untrained_parameters() -> Iterator[None]:
    """Every block of a Mixtral has a matrix that only chooses, as an indexer does, and a bias that its code freezes."""
    build, compute = MixtralDecoderLayer.__init__, MixtralDecoderLayer.forward

    def init(self: Any, config: Any, layer_idx: int) -> None:
        build(self, config, layer_idx)
        self.indexer = nn.Parameter(torch.ones(config.hidden_size, config.hidden_size))
        self.choice_bias = nn.Parameter(torch.zeros(config.hidden_size), requires_grad=False)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        scores = hidden_states @ self.indexer + self.choice_bias
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(8, dim=-1).indices, 0.1)
        return compute(self, hidden_states * (1.0 + chosen), *args, **kwargs)

    with (
        patch.object(MixtralDecoderLayer, "__init__", init),
        patch.object(MixtralDecoderLayer, "forward", forward),
    ):
        yield


def _with_gradient(name: str, value: Any) -> Any:
    """Each rank's gradient of one parameter replaced, before the update."""
    original = Updates.finish_step

    def finish_step(self: Updates) -> Any:
        parameter = self.engine.trained[name]
        parameter.grad = None if value is None else torch.full_like(parameter, value)
        return original(self)

    return patch.object(Updates, "finish_step", finish_step)


def gradient_lost() -> Any:
    return _with_gradient("model.norm.weight", None)


def gradient_of_zeros() -> Any:
    """The optimizer would decay a weight that one process keeps."""
    return _with_gradient(UNTRAINED[0], 0.0)


def verdicts(rank: int, _world: int, run: Tables, plan: Tables, scratch: str) -> dict[str, Tables]:
    mutations = {mutate.__name__: mutate for mutate in (gradient_lost, gradient_of_zeros)}
    with untrained_parameters():
        return mutated_verdicts_in_rank(rank, run, plan, scratch, mutations, steps=3)


@pytest.mark.parametrize("plan", by_default([], [EXPERTS, REPLICAS], extended=[EXPERTS]))
def test_parameters_without_a_gradient_are_named_and_a_lost_gradient_is_wrong(
    plan: Tables, corpus: Path, tmp_path: Path
) -> None:
    run = small_run(str(corpus), model="mixtral")
    found = run_ranks(verdicts, 2, run, plan, str(tmp_path), timeout_s=LIMIT_S)[0]
    assert found[""]["ok"], found[""]["checks"]
    assert found[""]["untrained_parameters"] == UNTRAINED
    for name, parameter in (("gradient_lost", "model.norm.weight"), ("gradient_of_zeros", UNTRAINED[0])):
        assert found[name]["first_wrong"] == "gradients"
        (gradients,) = (check for check in found[name]["checks"] if check["name"] == "gradients")
        assert gradients["finding"]["parameter"] == parameter


def refusal(rank: int, _world: int, run: Tables, scratch: str) -> str:
    with untrained_parameters(), open_session(run, scratch, steps=2) as session:
        try:
            session.evidence(Plan.from_tables({"mesh": {"dp_replicate": 2}}))
        except PlanError as error:
            return f"{error} {error.hint}"
    return ""


def test_ddp_that_waits_for_such_gradients_is_refused(corpus: Path, tmp_path: Path) -> None:
    """torch would not reduce the buckets that hold them, and fail in the second step."""
    for text in run_ranks(refusal, 2, small_run(str(corpus), model="mixtral"), str(tmp_path)):
        assert f"2 parameters get no gradient ({UNTRAINED[0]} for one)" in text
        assert "find_unused_parameters = true" in text


# afmoe, ernie4_5_moe and laguna freeze the bias of their routers; the indexers of the others only choose tokens, and
# deepseek_v4 compresses keys of long rows alone
FAMILIES = by_default([], ["afmoe", "ernie4_5_moe", "laguna", "axk2", "deepseek_v4", "hy_v4"])


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_such_parameters_pass(family: str, corpus: Path, tmp_path: Path) -> None:
    fields: Tables = {}
    tiny_families.config_of(family, given=fields)
    run = {**small_run(str(corpus)), "model": {"type": family, "config": fields}}
    cases = {family: (run, EXPERTS)}
    verdict = run_ranks(verdicts_of_many_in_rank, 2, cases, str(tmp_path), 3, timeout_s=LIMIT_S)[0][family]
    assert verdict["ok"], verdict["checks"]
