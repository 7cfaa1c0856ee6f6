"""What a plan leaves open: a GPU's fast path where it is built, nothing on a CPU, and never against what is said."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.errors import NotBuiltError, UnknownKeyError
from weft.core.executable import require_executable
from weft.core.open_choices import plan_on
from weft.core.plan import Plan


def test_a_gpu_computes_in_bf16_compiled_with_a_fused_loss() -> None:
    plan = plan_on({}, on_gpu=True)
    assert (plan.precision.preset, plan.compile.enabled, plan.kernels.loss) == ("bf16", True, "fused")


def test_a_cpu_takes_the_plan_as_it_is() -> None:
    assert plan_on({}, on_gpu=False) == Plan()


@pytest.mark.parametrize(
    ("tables", "enabled", "loss"),
    [
        ({"compile": {"enabled": False}}, False, "whole"),
        ({"compile": {"enabled": False}, "kernels": {"loss": "fused"}}, False, "fused"),
        ({"compile": {"enabled": True}}, True, "fused"),
        ({"kernels": {"loss": "whole"}}, True, "whole"),
        ({"precision": {"preset": "fp32"}}, True, "fused"),
        ({"activations": {"policy": "selective"}}, False, "fused"),
        ({"activations": {"policy": "full"}}, True, "fused"),
        ({"activations": {"policy": "budget"}}, True, "fused"),
        ({"mesh": {"tp": 2}}, False, "fused"),
        ({"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}}, False, "whole"),
        ({"mesh": {"pp": 2}}, True, "fused"),
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv", "virtual_stages": 2}}, False, "fused"),
        ({"data_parallel": {"strategy": "dataparallel"}}, False, "whole"),
    ],
)
def test_the_fast_path_is_on_where_it_is_built(tables: dict[str, Any], enabled: bool, loss: str) -> None:
    plan = plan_on(tables, on_gpu=True)
    assert (plan.compile.enabled, plan.kernels.loss) == (enabled, loss)
    require_executable(plan)


def test_what_is_named_stays_and_is_refused_with_its_switch_where_it_is_not_built() -> None:
    plan = plan_on({"mesh": {"tp": 2}, "compile": {"enabled": True}}, on_gpu=True)
    with pytest.raises(NotBuiltError, match="compiled blocks with tensor parallelism") as caught:
        require_executable(plan)
    assert caught.value.hint == "set compile.enabled = false"


def test_a_settled_plan_means_itself_on_any_device() -> None:
    for tables in ({}, {"mesh": {"tp": 2}}, {"compile": {"enabled": False}}):
        plan = plan_on(tables, on_gpu=True)
        assert plan_on(plan.model_dump(mode="json", exclude_none=True), on_gpu=True) == plan
        assert plan_on(plan.model_dump(mode="json", exclude_none=True), on_gpu=False) == plan


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("tables", [{"compile": {"enable": True}}, {"mesh": {"tpp": 2}}])
def test_a_wrong_key_is_told_with_its_file(on_gpu: bool, tables: dict[str, Any]) -> None:
    with pytest.raises(UnknownKeyError, match=r"my\.toml"):
        plan_on(tables, on_gpu=on_gpu, source="my.toml")
