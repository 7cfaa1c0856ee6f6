"""One resolution of a plan: its mesh, a GPU's fast path where it is built, legality, and a recompute mixture."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.errors import BatchError, MeshError, NotBuiltError, PlanError, UnknownKeyError
from weft.core.executable import require_executable
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.resolve import resolve, with_choices, with_mesh, with_update_for


def test_a_gpu_computes_in_bf16_compiled_with_a_fused_loss() -> None:
    plan = with_choices({}, on_gpu=True)
    assert (plan.precision.preset, plan.compile.enabled, plan.kernels.loss) == ("bf16", True, "fused")


def test_a_cpu_takes_the_plan_as_it_is() -> None:
    assert with_choices({}, on_gpu=False) == Plan()


@pytest.mark.parametrize(("base", "enabled"), [("bfloat16", True), ("int8", False), ("nf4", False)])
def test_blocks_beside_codes_are_not_compiled_by_themselves(base: str, enabled: bool) -> None:
    run = RunSpec.from_tables({"model": {"type": "llama"}, "adapter": {"kind": "lora", "base": base}})
    plan = resolve({}, run, on_gpu=True, num_ranks=1)
    assert (plan.compile.enabled, plan.kernels.loss) == (enabled, "fused")


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
    plan = with_choices(tables, on_gpu=True)
    assert (plan.compile.enabled, plan.kernels.loss) == (enabled, loss)
    require_executable(plan)


def test_what_is_named_stays_and_is_refused_with_its_switch_where_it_is_not_built() -> None:
    plan = with_choices({"mesh": {"tp": 2}, "compile": {"enabled": True}}, on_gpu=True)
    with pytest.raises(NotBuiltError, match="compiled blocks with tensor parallelism") as caught:
        require_executable(plan)
    assert caught.value.hint == "set compile.enabled = false"


def test_a_resolved_plan_stays_the_same_on_any_device() -> None:
    for tables in ({}, {"mesh": {"tp": 2}}, {"compile": {"enabled": False}}):
        plan = with_choices(tables, on_gpu=True)
        assert with_choices(plan.model_dump(mode="json", exclude_none=True), on_gpu=True) == plan
        assert with_choices(plan.model_dump(mode="json", exclude_none=True), on_gpu=False) == plan


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("tables", [{"compile": {"enable": True}}, {"mesh": {"tpp": 2}}])
def test_a_wrong_key_is_told_with_its_file(on_gpu: bool, tables: dict[str, Any]) -> None:
    with pytest.raises(UnknownKeyError, match=r"my\.toml"):
        with_choices(tables, on_gpu=on_gpu, source="my.toml")


RUN = RunSpec.default()


@pytest.mark.parametrize(
    ("tables", "num_ranks", "mesh"),
    [
        ({}, None, {}),
        ({}, 1, {}),
        ({}, 3, {"dp_replicate": 3}),
        ({"data_parallel": {"zero": 3}}, 2, {"dp_shard": 2}),
        ({"mesh": {"dp_shard": 2}}, None, {"dp_shard": 2}),
        ({"mesh": {"dp_shard": 2, "dp_replicate": 2}}, 4, {"dp_shard": 2, "dp_replicate": 2}),
    ],
)
def test_the_mesh_follows_the_ranks(tables: dict[str, Any], num_ranks: int | None, mesh: dict[str, int]) -> None:
    found = with_mesh(tables, num_ranks=num_ranks)
    assert found.get("mesh", {}) == mesh
    assert Plan.from_tables(found).num_ranks == (num_ranks or Plan.from_tables(tables).num_ranks)


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(MeshError, match=r"^my\.toml: the mesh has 4 ranks .* but 2 were asked for") as caught:
        resolve({"mesh": {"dp_shard": 4}}, RUN, on_gpu=False, num_ranks=2, source="my.toml")
    assert "--nproc 4" in caught.value.hint


@pytest.mark.parametrize(
    ("tables", "error"),
    [
        ({"offload": {"optimizer": "cpu", "folder": "states"}}, NotBuiltError),
        ({"pipeline": {"microbatches": 7}}, BatchError),
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv", "virtual_stages": 1}}, PlanError),
        ({"data_parallel": {"zero": 0}, "mesh": {"dp_shard": 2}}, PlanError),
    ],
)
def test_a_plan_that_cannot_run_is_not_resolved(tables: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        resolve(tables, RUN, on_gpu=False)


def test_a_mixture_is_chosen_for_named_devices_and_once() -> None:
    tables = {"activations": {"policy": "budget"}}
    assert resolve(tables, RUN, on_gpu=False).activations.is_open
    chosen = resolve(tables, RUN, on_gpu=False, devices=lambda count: f"{count}xCPU")
    assert chosen.activations.mixture is not None

    def refuse(count: int) -> str:
        raise AssertionError("nothing is open")

    again = chosen.model_dump(mode="json", exclude_none=True)
    assert resolve(again, RUN, on_gpu=True, devices=refuse) == chosen


def test_a_mixture_for_an_unknown_model_is_an_error() -> None:
    run = RunSpec.from_tables({"model": {"path": "nobody/unheard-of"}})
    with pytest.raises(PlanError, match="cannot choose the recompute mixture") as caught:
        resolve({"activations": {"policy": "budget"}}, run, on_gpu=False, devices=lambda count: "CPU")
    assert "activations.mixture" in caught.value.hint


def offloaded(**keys: Any) -> Plan:
    return Plan.from_tables({"precision": {"preset": "bf16"}, "offload": {"optimizer": "cpu", **keys}})


def test_staging_is_refused_where_the_host_was_chosen_to_update() -> None:
    tables = {"offload": {"optimizer": "cpu", "staging_bytes": 2**20}}
    assert resolve(tables, RUN, on_gpu=True).offload.update == "device"
    with pytest.raises(NotBuiltError, match=r"offload\.staging_bytes with offload.update = 'host'") as caught:
        resolve(tables, RUN, on_gpu=False)
    assert "staging_bytes = 0" in caught.value.hint


def test_the_place_of_an_offloaded_update_is_chosen_for_the_machine() -> None:
    """Moments stream through a GPU, on any link; a CPU updates where they are."""
    places = {
        device: with_update_for(lambda count, name=device: f"{count}x{name}", RUN, offloaded(), on_gpu=device != "CPU")
        for device in ("H200", "T4", "CPU")
    }
    found = {name: plan.offload.update for name, plan in places.items()}
    assert found == {"H200": "device", "T4": "device", "CPU": "host"}


@pytest.mark.parametrize(("on_gpu", "place"), [(True, "device"), (False, "host")])
def test_without_a_known_machine_the_kind_of_device_decides(on_gpu: bool, place: str) -> None:
    assert with_update_for(None, RUN, offloaded(), on_gpu=on_gpu).offload.update == place
    unknown = with_update_for(lambda count: f"{count}xNobodysGPU", RUN, offloaded(), on_gpu=on_gpu)
    assert unknown.offload.update == place


def test_a_given_place_and_states_on_the_device_stay() -> None:
    def refuse(count: int) -> str:
        raise AssertionError("nothing is open")

    for plan in (offloaded(update="host"), Plan()):
        assert with_update_for(refuse, RUN, plan, on_gpu=True) == plan
