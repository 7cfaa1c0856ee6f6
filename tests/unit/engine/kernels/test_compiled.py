"""Compiled blocks: the same numbers, one graph for blocks that are alike, less kept. The compiler's own code is tested
on a GPU (tests/gpu); here graphs are captured, cut into forward and backward, and run by torch."""

from __future__ import annotations

from typing import Any

import expert_families
import pytest
import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as partitioner
from tiny import build_engine, global_batch
from tolerances import SAME_STEP_REL
from torch._dynamo.utils import counters

import weft.engine.kernels.compiled as compiled
from weft.core.errors import DeviceError, NotBuiltError
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.kernels.fast_path import fast_path
from weft.engine.measure.meter import StepMeter
from weft.engine.wrap_forward import is_wrapped

# torch's own tracing asks non-leaf tensors for gradients, and hides that warning only where warnings are no errors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

COMPILED = {"compile": {"enabled": True}}


@pytest.fixture(autouse=True)
def _no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()


def losses(engine: Engine, steps: int = 3) -> list[float]:
    return [engine.step(global_batch(step)).loss for step in range(steps)]


def is_compiled(engine: Engine) -> tuple[bool, str]:
    (record,) = [row for row in fast_path(engine) if row.technique == "compiled blocks"]
    return record.on, record.why


EXTENDED = pytest.mark.extended


@pytest.mark.parametrize(
    ("family", "tables"),
    [
        pytest.param("llama", {}, marks=EXTENDED),
        ("llama", {"data_parallel": {"zero": 3}}),
        ("llama", {"activations": {"policy": "full"}, "pipeline": {"microbatches": 2}}),
        pytest.param("llama", {"activations": {"policy": "budget", "mixture": [2, 0]}}, marks=EXTENDED),
        pytest.param("qwen3-tied", {"precision": {"preset": "bf16"}}, marks=EXTENDED),
        ("qwen3-tied", {"precision": {"preset": "bf16"}, "data_parallel": {"zero": 2}, "kernels": {"loss": "fused"}}),
    ],
)
def test_the_losses_are_those_of_eager_blocks(family: str, tables: dict[str, Any]) -> None:
    eager, engine = build_engine(family, tables), build_engine(family, {**tables, **COMPILED})
    assert losses(engine) == pytest.approx(losses(eager), rel=SAME_STEP_REL)
    assert engine.evaluate(global_batch(9)).loss == pytest.approx(
        eager.evaluate(global_batch(9)).loss, rel=SAME_STEP_REL
    )
    assert is_compiled(engine)[0]


def test_blocks_that_are_alike_share_a_graph() -> None:
    engine = build_engine("llama", {**COMPILED, "data_parallel": {"zero": 3}})
    losses(engine)
    assert counters["stats"]["unique_graphs"] == 2, "one for the six blocks, one for the last norm"
    assert not counters["graph_break"]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_routers_in_float32_are_no_objects_of_each_block(family: str) -> None:
    """A wrapped forward would give each block a graph of its own (tests/gpu/test_fast_path_gpu.py counts them)."""
    spec = ModelSpec(type=family, config=expert_families.FAMILIES[family])
    engine = build_engine(spec, {"precision": {"preset": "bf16"}})
    engine.step(global_batch(0))
    assert engine.plan.precision.policy().has_wide_router
    for block in map(engine.model.get_submodule, engine.layout.blocks):
        assert not [name for name, part in block.named_modules() if name and is_wrapped(part)]


def test_a_measured_step_leaves_the_graph_whole() -> None:
    """Blocks are compiled in the first step, which a run measures: what listens there must not become a part of it."""
    engine = build_engine("llama", COMPILED)
    meter = StepMeter(engine)
    for step in range(2):
        with meter.measuring():
            meter.next_step()
            engine.step(global_batch(step))
    assert meter.is_complete
    losses(engine)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_less_is_kept_than_by_torch_s_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own partition, on a CPU; this is also what fails when the private setting moves."""
    kept = []
    for settings in ({}, compiled.SAVES_LESS):
        torch._dynamo.reset()
        monkeypatch.setattr(compiled, "SAVES_LESS", settings)
        monkeypatch.setattr(compiled, "BACKEND", "aot_eager_decomp_partition")
        kept.append(_kept_bytes(build_engine("llama", {**COMPILED, "precision": {"preset": "bf16"}})))
    assert partitioner.ban_recompute_materialized_backward is True, "torch's own rule stays for everybody else"
    assert kept[1] < kept[0] * 0.85


def _kept_bytes(engine: Engine) -> int:
    """Of one forward, by storage; parameters not counted."""
    found: dict[int, int] = {}
    own = {value.untyped_storage()._cdata for value in engine.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
        return tensor

    block = engine.model.get_submodule(engine.layout.blocks[0])
    hidden = torch.randn(4, 32, 32, dtype=torch.bfloat16, requires_grad=True)
    rotary = engine.model.get_submodule("model.rotary_emb")(hidden, torch.arange(32)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(hidden, position_embeddings=rotary, attention_mask=None)
    del out
    return sum(found.values())


def test_a_model_with_dropout_stays_as_it_is_and_says_so() -> None:
    engine = build_engine("gpt2", COMPILED)
    assert losses(engine) == losses(build_engine("gpt2"))
    assert is_compiled(engine) == (False, "the model has dropout")
    assert "dropout" in engine.notes[-1]


@pytest.mark.parametrize(
    "tables",
    [
        {"mesh": {"tp": 2}},
        *({"mesh": {"pp": 2}, "pipeline": {"schedule": name}} for name in ("zero_bubble", "zbv", "dualpipev")),
        {"activations": {"policy": "selective"}},
    ],
)
def test_what_is_not_compiled_yet_is_refused(tables: dict[str, Any]) -> None:
    with pytest.raises(NotBuiltError, match="compiled blocks"):
        build_engine("llama", {**tables, **COMPILED})


def test_the_cause_of_another_compilation_is_heard() -> None:
    watch = compiled.RecompileWatch()
    engine = build_engine("llama", COMPILED)
    losses(engine)
    watch.take()
    losses(engine)
    assert watch.take() == []
    engine.step(global_batch(0, length=24))
    causes = watch.take()
    watch.close()
    assert "size mismatch" in causes[0]


def test_what_is_compiled_between_two_runs_of_a_process_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    compiled.RecompileWatch().close()
    compiled.RecompileWatch().close()
    engine = build_engine("llama", COMPILED)
    losses(engine)
    engine.step(global_batch(0, length=24))
    assert "__recompiles" not in capfd.readouterr().err


def test_kernels_are_not_chosen_by_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forms of a sum round differently: a run would not have the same bits again (tests/gpu shows that it has)."""
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda own, **given: asked.append(given["options"]) or own)
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    build_engine("llama", COMPILED)
    assert asked
    assert all(options["deterministic"] for options in asked)
    assert not torch._inductor.config.deterministic, "torch's own default has changed: nothing is left to be asked for"


def test_without_a_compiler_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError, match="no-such-compiler was not found"):
        build_engine("llama", COMPILED)


def test_what_the_compiler_cannot_do_runs_as_it_stands_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no kernel for this operator\nset a variable for more")

    monkeypatch.setattr(compiled, "BACKEND", refuse)
    eager, engine = build_engine("llama", {}), build_engine("llama", COMPILED)
    assert losses(engine) == losses(eager)
    on, why = is_compiled(engine)
    assert not on
    assert "no kernel for this operator" in why
    assert "variable" not in why


@dynamo.patch(recompile_limit=3)
def test_one_shape_too_many_is_told_and_the_next_engine_begins_anew() -> None:
    engine, limit = build_engine("llama", COMPILED), dynamo.recompile_limit
    for length in range(8, 8 + limit):
        engine.evaluate(global_batch(0, length=length))
    assert is_compiled(engine)[0], "as many graphs are allowed"
    for length in (8 + limit, 8):
        eager = build_engine("llama", {})
        batch = global_batch(1, length=length)
        assert engine.evaluate(batch).loss == pytest.approx(eager.evaluate(batch).loss, rel=SAME_STEP_REL)
    on, why = is_compiled(engine)
    assert not on
    assert f"more than {limit} shapes" in why
    engine = build_engine("llama", COMPILED)
    losses(engine, steps=1)
    assert is_compiled(engine)[0], "whatever engines before had"


def test_an_error_of_the_model_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine("llama", COMPILED)
    block = engine.model.get_submodule(engine.layout.blocks[0])
    monkeypatch.setattr(block.mlp, "forward", lambda rows: rows @ rows)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|size|shape"):
        engine.step(global_batch(0))


def test_a_function_of_any_rows_has_one_graph() -> None:
    """And one for a single row, which torch compiles apart."""
    sizes = range(1, 3 * int(dynamo.recompile_limit))
    double = compiled._Compiled(_double, has_any_rows=True)
    for size in sizes:
        assert double(torch.ones(size, 2)).sum().item() == 4 * size
    assert (double.failure, counters["stats"]["unique_graphs"] <= 3) == ("", True)


def _double(rows: torch.Tensor) -> torch.Tensor:
    return 2 * rows


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # torch's own tracing
def test_operands_are_measured_without_the_graph_and_layers_fall_back_inside_it() -> None:
    float8 = {"linears": "all", "measure_every": 2, "fallback_error": 0.01}
    tables = {"precision": {"preset": "bf16"}, "float8": float8, "compile": {"enabled": True}}
    eager, engine = (
        build_engine("qwen3-tied", {**tables, "compile": {"enabled": False}}),
        build_engine("qwen3-tied", tables),
    )
    assert losses(engine) == pytest.approx(losses(eager), rel=SAME_STEP_REL)
    assert engine.float8.scalars() == eager.float8.scalars()
    assert set(engine.float8.scalars().values()) == {2}
    assert is_compiled(engine)[0], is_compiled(engine)[1]
