"""Models written in the layouts of other programs, and imported: the same logits, bit by bit.

The writers here are the test's own: torch's DCP for torchtitan and Megatron (torch_dist), torch.save for DeepSpeed.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import sys
import types
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from weft.cli.main import app
from weft.core.errors import ModelError, WeftError, WeightsError
from weft.models.imports.convert import import_checkpoint

Tensors = dict[str, torch.Tensor]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(model_type: str, **others: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, pad_token_id=None, bos_token_id=1, eos_token_id=2, **others)
    model = AutoModelForCausalLM.from_config(config)
    for value in model.parameters():  # norms too: ones would hide that two are exchanged
        torch.nn.init.normal_(value, std=0.3)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.arange(3, 27).reshape(2, 12)).logits


def check_same(model: Any, checkpoint: Path, tmp_path: Path, **given: Any) -> dict[str, Any]:
    out = tmp_path / "imported"
    record = import_checkpoint(checkpoint, out, config=model.config, **given)
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.equal(logits(again), logits(model))
    return record


def save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # that it is a single process
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def state_of(model: Any) -> Tensors:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


# torchtitan


def as_torchtitan(model: Any) -> Tensors:
    names = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    found = {}
    for name, value in state_of(model).items():
        stem = name.removesuffix(".weight")
        if stem in names:
            found[f"{names[stem]}.weight"] = value
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):  # halves of a head -> neighbouring pairs
            heads = SIZES["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
            value = torch.stack(
                [torch.stack(each.chunk(2), dim=1).flatten(0, 1) for each in value.chunk(heads)]
            ).flatten(0, 1)
        found[f"layers.{layer}.{parts[part]}.weight"] = value
    return found


@pytest.mark.parametrize("prefix", ["", "model."])
def test_torchtitan(prefix: str, tmp_path: Path) -> None:
    model = build("llama")
    state = {prefix + name: value for name, value in as_torchtitan(model).items()}
    moments = {f"optimizer.state.{name}.exp_avg": value for name, value in state.items()}
    save({**state, **moments, "train_state": {"step": torch.tensor(7)}}, tmp_path / "run/step-10")
    save({name: value * 0 for name, value in state.items()}, tmp_path / "run/step-9")
    record = check_same(model, tmp_path / "run", tmp_path)
    assert (record["names"], record["format"], Path(record["from"]).name) == ("torchtitan", "DCP", "step-10")


def test_the_order_of_rotary_rows_is_that_of_neighbouring_pairs() -> None:
    """Scores of queries and keys that torchtitan rotates as complex numbers are those of Hugging Face's halves."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    model = build("llama")
    heads, groups, length = SIZES["num_attention_heads"], SIZES["num_key_value_heads"], 6
    own, hidden = as_torchtitan(model), torch.randn(length, SIZES["hidden_size"])
    angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
    turned = []
    for name, count in (("wq", heads), ("wk", groups)):
        rows = (hidden @ own[f"layers.0.attention.{name}.weight"].T).view(length, count, 4, 2)
        turned.append(
            torch.view_as_real(torch.view_as_complex(rows) * torch.polar(torch.ones_like(angles), angles)[:, None])
        )
    titan = torch.einsum("shpr,tgpr->hgst", *turned)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        queries = attention.q_proj(hidden).view(1, length, heads, 8).transpose(1, 2)
        keys = attention.k_proj(hidden).view(1, length, groups, 8).transpose(1, 2)
        cos, sin = LlamaRotaryEmbedding(model.config)(hidden, torch.arange(length)[None])
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
    torch.testing.assert_close(titan, torch.einsum("hsd,gtd->hgst", queries[0], keys[0]), atol=1e-4, rtol=1e-4)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    model = build("llama", tie_word_embeddings=True)
    state = as_torchtitan(model)
    save({**state, "output.weight": state["tok_embeddings.weight"]}, tmp_path / "same")
    check_same(model, tmp_path / "same", tmp_path)
    save({**state, "output.weight": state["tok_embeddings.weight"] + 1}, tmp_path / "other")
    with pytest.raises(WeightsError, match="differ, but the --config ties them"):
        import_checkpoint(tmp_path / "other", tmp_path / "out", config=model.config)


# Megatron-LM


def as_megatron(model: Any, *, stacked: bool, fused_norms: bool, split_gate: bool = False, padded: int = 8) -> Tensors:
    state, config = state_of(model), model.config
    pad = torch.full((padded, config.hidden_size), 9.0)
    found = {
        "embedding.word_embeddings.weight": torch.cat([state["model.embed_tokens.weight"], pad]),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if "lm_head.weight" in state:
        found["output_layer.weight"] = torch.cat([state["lm_head.weight"], pad])
    layers = [
        _megatron_layer(state, config, index, fused_norms, split_gate) for index in range(config.num_hidden_layers)
    ]
    for name in layers[0]:
        if stacked:
            found[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
        else:
            found |= {f"decoder.layers.{index}.{name}": layer[name] for index, layer in enumerate(layers)}
    return found


def _megatron_layer(state: Tensors, config: Any, index: int, fused_norms: bool, split_gate: bool) -> Tensors:
    own = {name.removeprefix(f"model.layers.{index}."): value for name, value in state.items() if f".{index}." in name}
    groups = config.num_key_value_heads
    found: Tensors = {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            parts = [own[f"self_attn.{letter}_proj.{kind}"].chunk(groups) for letter in "qkv"]
            found[f"self_attention.linear_qkv.{kind}"] = torch.cat(
                [torch.cat(group) for group in zip(*parts, strict=True)]
            )
    norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    norms = norms if fused_norms else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    gate, up = own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]
    split = {"mlp.linear_fc1.weight_w": gate, "mlp.linear_fc1.weight_v": up}
    found |= split if split_gate else {"mlp.linear_fc1.weight": torch.cat([gate, up])}
    found |= {
        "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
        "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
        norms[0]: own["input_layernorm.weight"],
        norms[1]: own["post_attention_layernorm.weight"],
    }
    if "self_attn.q_norm.weight" in own:
        found["self_attention.q_layernorm.weight"] = own["self_attn.q_norm.weight"]
        found["self_attention.k_layernorm.weight"] = own["self_attn.k_norm.weight"]
    return found


def write_torch_dist(state: Tensors, folder: Path) -> None:
    """With optimizer states and extra states, and metadata of a class that is not installed where it is read."""
    moments = {f"optimizer.state.exp_avg.{name}": value for name, value in state.items()}
    extra = {"decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3": b"fp8"}
    save({**state, **moments, **extra}, folder)
    module = types.ModuleType("megatron_metadata")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    module.MCoreMetadata = type("MCoreMetadata", (type(metadata),), {"__module__": module.__name__})  # type: ignore[attr-defined]
    metadata.__class__ = module.MCoreMetadata
    metadata.mcore_data = {"embedding": {}}
    sys.modules[module.__name__] = module
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    del sys.modules[module.__name__]


MEGATRON: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, stacked layers, fused norms": ("llama", {}, {"stacked": True, "fused_norms": True}),
    "llama, numbered layers, gate apart": ("llama", {}, {"stacked": False, "fused_norms": False, "split_gate": True}),
    "qwen2, biases": ("qwen2", {}, {"stacked": True, "fused_norms": True}),
    "qwen3, norms of heads, tied": (
        "qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {"stacked": True, "fused_norms": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MEGATRON)
def test_megatron(case: str, tmp_path: Path) -> None:
    family, others, layout = MEGATRON[case]
    model = build(family, **others)
    (tmp_path / "run").mkdir()
    write_torch_dist(as_megatron(model, **layout), tmp_path / "run/iter_0000012")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("12\n")
    record = check_same(model, tmp_path / "run", tmp_path)
    assert (record["names"], Path(record["from"]).name) == ("Megatron", "iter_0000012")


# DeepSpeed


class LossScaler:
    """As DeepSpeed pickles an object of its own; the class is not importable where the file is read."""

    __module__ = "deepspeed"


def write_zero(model: Any, folder: Path, *, stage: int, ranks: int = 3, tag: str = "global_step5") -> None:
    state = state_of(model)
    names = [name for name in state if "layers.0." not in name]
    groups = [names[: len(names) // 2], names[len(names) // 2 :]]
    frozen = {name: value for name, value in state.items() if "layers.0." in name}
    where = folder / tag
    where.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    flat = [_zero_flat([state[name] for name in group], stage=stage, ranks=ranks) for group in groups]
    for rank in range(ranks):
        fragments = {name: _part(value, rank, ranks) if stage == 3 else value for name, value in frozen.items()}
        states = {
            "module": {}, "buffer_names": [], "shared_params": {"lm_head.weight": "model.embed_tokens.weight"}
            if model.config.tie_word_embeddings else {},
            "param_shapes": [OrderedDict((name, state[name].shape) for name in group) for group in groups],
            "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()),
            "frozen_param_fragments": fragments, "ds_version": "0.17.0", "scaler": LossScaler(),
        }  # fmt: skip
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        optimizer = {
            "zero_stage": stage,
            "partition_count": ranks if stage == 3 else [ranks, ranks],
            "loss_scaler": LossScaler(),
        }
        optimizer[key] = [parts[rank] for parts in flat]
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            save_with_own_class(states, where / name)
        save_with_own_class(
            {"optimizer_state_dict": optimizer}, where / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )


def save_with_own_class(value: Any, file: Path) -> None:
    module = types.ModuleType(LossScaler.__module__)
    module.LossScaler = LossScaler  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    torch.save(value, file)
    del sys.modules[module.__name__]


def _zero_flat(values: list[torch.Tensor], *, stage: int, ranks: int) -> list[torch.Tensor]:
    """The flat float32 tensor of each rank for one group."""
    if stage == 3:
        return [torch.cat([_part(value, rank, ranks) for value in values]) for rank in range(ranks)]
    joined = torch.cat([value.flatten() for value in values])
    aligned = 2 * ranks * math.ceil(joined.numel() / (2 * ranks))
    return list(torch.cat([joined, torch.full((aligned - joined.numel(),), 9.0)]).chunk(ranks))


def _part(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = math.ceil(value.numel() / ranks)
    padded = torch.cat([value.flatten(), torch.full((size * ranks - value.numel(),), 9.0)])
    return padded[rank * size : (rank + 1) * size].clone()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_zero(stage: int, tied: bool, tmp_path: Path) -> None:
    model = build("llama", tie_word_embeddings=tied)
    write_zero(model, tmp_path / "run", stage=stage)
    record = check_same(model, tmp_path / "run", tmp_path)
    assert (record["names"], record["format"]) == ("Hugging Face", "ZeRO")


def test_zero_of_too_few_ranks_is_refused(tmp_path: Path) -> None:
    model = build("llama")
    write_zero(model, tmp_path / "run", stage=2)
    (tmp_path / "run/global_step5/zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(WeightsError, match="optimizer files of 2 ranks, but was written by 3"):
        import_checkpoint(tmp_path / "run", tmp_path / "out", config=model.config)


def test_deepspeed_without_zero(tmp_path: Path) -> None:
    model = build("llama")
    (tmp_path / "run").mkdir()
    state = {f"module.{name}": value for name, value in state_of(model).items()}
    save_with_own_class({"module": state, "scaler": LossScaler()}, tmp_path / "run/mp_rank_00_model_states.pt")
    check_same(model, tmp_path / "run", tmp_path)
    (tmp_path / "run/mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(WeightsError, match="several model-parallel ranks"):
        import_checkpoint(tmp_path / "run", tmp_path / "out", config=model.config)


def test_universal(tmp_path: Path) -> None:
    model = build("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=32)  # names are the model's: any family
    for name, value in state_of(model).items():
        folder = tmp_path / "run/global_step5_universal/zero" / f"module.{name}"
        folder.mkdir(parents=True)
        torch.save({"param": value, "cat_dim": 0}, folder / "fp32.pt")
        torch.save({"param": value * 0}, folder / "exp_avg.pt")
    (tmp_path / "run/latest_universal").write_text("global_step5_universal")
    assert check_same(model, tmp_path / "run", tmp_path)["format"] == "universal"


def test_a_dcp_of_the_models_own_names(tmp_path: Path) -> None:
    model = build("qwen3", head_dim=16, tie_word_embeddings=True)
    state = {"app": {"model": {**model.state_dict()}, "optim": {}}}
    save(state, tmp_path / "run")
    assert check_same(model, tmp_path / "run", tmp_path)["names"] == "Hugging Face"


# refusals


def test_other_families_are_refused_with_the_reason(tmp_path: Path) -> None:
    state = as_torchtitan(build("llama"))
    save(state, tmp_path / "titan")
    with pytest.raises(ModelError, match=r"torchtitan checkpoint of a qwen3 is not imported") as caught:
        import_checkpoint(tmp_path / "titan", tmp_path / "out", config=build("qwen3").config)
    assert "order of rotary dimensions" in caught.value.hint
    write_torch_dist(as_megatron(build("llama"), stacked=True, fused_norms=True), tmp_path / "iter")
    with pytest.raises(ModelError, match="Megatron checkpoint of a gemma2 is not imported"):
        import_checkpoint(tmp_path / "iter", tmp_path / "out", config=build("gemma2").config)


def test_what_does_not_fit_the_config_is_refused(tmp_path: Path) -> None:
    write_torch_dist(as_megatron(build("llama"), stacked=False, fused_norms=True), tmp_path / "iter")
    for changes, sentence in {
        "num_hidden_layers=2": "more tensors that a llama lacks",
        "num_hidden_layers=4": "and 8 more are missing",
        "intermediate_size=64": "does not give",
        "num_key_value_heads=4": "does not give|is not valid|invalid",
    }.items():
        key, value = changes.split("=")
        config = AutoConfig.for_model("llama", **{**SIZES, key: int(value)}, bos_token_id=1, eos_token_id=2)
        with pytest.raises(WeightsError, match=sentence):
            import_checkpoint(tmp_path / "iter", tmp_path / "out", config=config)
    assert not (tmp_path / "out").exists()
    (tmp_path / "legacy/mp_rank_00").mkdir(parents=True)
    (tmp_path / "legacy/mp_rank_00/model_optim_rng.pt").touch()
    with pytest.raises(WeightsError, match="older format") as caught:
        import_checkpoint(tmp_path / "legacy", tmp_path / "out", config=config)
    assert "--ckpt-format torch_dist" in caught.value.hint


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w').close()",))

    model = build("llama")
    save(as_torchtitan(model), tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp/.metadata").read_bytes())
    metadata.planner_data = Attack()
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    through = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93"
    command = f"touch {tmp_path / 'ran'}".encode()
    (tmp_path / "path").mkdir()
    (tmp_path / "path/.metadata").write_bytes(through + b"X" + len(command).to_bytes(4, "little") + command + b"\x85R.")
    write_zero(model, tmp_path / "zero", stage=2)
    file = tmp_path / "zero/global_step5/mp_rank_00_model_states.pt"
    torch.save({"module": state_of(model), "attack": Attack()}, file)
    for checkpoint in ("dcp", "path", "zero"):
        with contextlib.suppress(WeftError):
            import_checkpoint(tmp_path / checkpoint, tmp_path / f"out-{checkpoint}", config=model.config)
    assert not (tmp_path / "ran").exists()


def test_the_command(tmp_path: Path) -> None:
    model = build("llama")
    model.config.save_pretrained(tmp_path / "config")
    save(as_torchtitan(model), tmp_path / "step-3")
    arguments = ["import", str(tmp_path / "step-3"), str(tmp_path / "out")]
    refused = CliRunner().invoke(app, arguments).exception
    assert isinstance(refused, ModelError)
    assert "has no config.json" in refused.message
    given = [*arguments, "--config", str(tmp_path / "config/config.json"), "--dtype", "bfloat16", "--json"]
    done = CliRunner().invoke(app, given, catch_exceptions=False)
    assert json.loads(done.stdout)["names"] == "torchtitan"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype is torch.bfloat16
