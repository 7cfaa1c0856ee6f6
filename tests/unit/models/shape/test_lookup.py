"""Shapes from configs: aliases, nesting, guesses, what tensor parallelism and activation memory read, errors."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from weft import zoo
from weft.core.errors import BadValueError, ConfigFileError, ModelError, WeftError
from weft.core.model_shape import BlockShape, ModelShape
from weft.models.shape import lookup
from weft.models.shape.lookup import shape_from_path, shape_from_type, shape_of


def linear(block: BlockShape, name: str) -> tuple[int, int, str]:
    found = next(linear for linear in block.linears if linear.name == name)
    return found.in_features, found.out_features, found.style


@settings(max_examples=10)
@given(
    heads=st.integers(1, 16), groups=st.integers(1, 4), dim=st.sampled_from([8, 16, 64]), width=st.integers(1, 500),
    layers=st.integers(1, 40), vocab=st.integers(1, 2000), is_tied=st.booleans(), has_bias=st.booleans(),
)  # fmt: skip
def test_llama_follows_its_closed_form(
    *, heads: int, groups: int, dim: int, width: int, layers: int, vocab: int, is_tied: bool, has_bias: bool
) -> None:
    q, hidden, kv = heads * groups * dim, heads * groups * dim, heads * dim
    shape = shape_from_type(
        "llama",
        {
            "hidden_size": hidden, "num_attention_heads": heads * groups, "num_key_value_heads": heads, "head_dim": dim,
            "intermediate_size": width, "num_hidden_layers": layers, "vocab_size": vocab,
            "tie_word_embeddings": is_tied, "attention_bias": has_bias, "pad_token_id": None,
        },
    )  # fmt: skip
    attention = hidden * (2 * q + 2 * kv) + has_bias * (q + 2 * kv + hidden)
    block = attention + 3 * hidden * width + 2 * hidden
    assert shape.num_parameters == vocab * hidden * (1 if is_tied else 2) + layers * block + hidden
    assert shape.num_active_parameters == shape.num_parameters
    assert shape.num_layers == layers


def test_styles_are_those_of_one_dimensional_tensor_parallelism() -> None:
    (block,) = shape_from_type("llama").kinds
    styles = {linear.name: linear.style for linear in block.linears}
    assert [styles[f"self_attn.{name}_proj"] for name in "qkvo"] == ["column", "column", "column", "row"]
    assert [styles[f"mlp.{name}_proj"] for name in ("gate", "up", "down")] == ["column", "column", "row"]


def test_latent_attention_keeps_its_down_projections_whole() -> None:
    dense, moe = shape_from_type("deepseek_v3").kinds
    assert linear(dense, "self_attn.kv_a_proj_with_mqa") == (7168, 576, "replicated")
    assert linear(dense, "self_attn.kv_b_proj") == (512, 32768, "column")
    assert dense.attention is not None
    assert (dense.attention.is_latent, dense.attention.latent_dim) == (True, 576)
    assert (dense.attention.head_dim, dense.attention.value_dim) == (192, 128)
    assert moe.moe is not None
    assert (moe.moe.num_experts, moe.moe.top_k, moe.moe.shared_width) == (256, 8, 2048)
    assert linear(moe, "mlp.gate")[2] == "replicated"


def test_experts_are_copies_of_which_a_token_meets_a_few() -> None:
    (block,) = shape_from_type("mixtral").kinds
    experts = [linear for linear in block.linears if linear.role == "expert"]
    assert {(linear.copies, linear.active) for linear in experts} == {(8, 2)}
    assert block.expert_parameters == 8 * 3 * 4096 * 14336


@pytest.mark.parametrize(("model_type", "saves"), [("deepseek_v3", False), ("qwen2_moe", True)])
def test_shared_experts_that_are_called_last_save_nothing_after_the_others(model_type: str, saves: bool) -> None:
    """They are computed while tokens travel. qwen2_moe calls them first, and weighs them last."""
    moe = next(kind.moe for kind in shape_from_type(model_type, {}).kinds if kind.moe is not None)
    assert moe.saves_after_experts == saves


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("gemma3_text", {"sliding": 22, "dense": 4}),
        ("qwen3_next", {"linear_moe": 36, "moe": 12}),
        pytest.param("jamba", {"linear": 12, "linear_moe": 16, "dense": 4}, marks=pytest.mark.slow),
        ("deepseek_v3", {"dense": 3, "moe": 58}),
        ("nemotron_h", {"linear": 1, "moe": 1, "attention": 1, "dense": 1}),
    ],
)
def test_kinds_of_layers(model_type: str, kinds: dict[str, int]) -> None:
    shape = shape_from_type(model_type)
    assert {kind.kind: count for kind, count in zip(shape.kinds, shape.kind_counts, strict=True)} == kinds


def test_what_activation_memory_reads() -> None:
    gpt2, gemma2, cohere = (shape_from_type(name).kinds[0] for name in ("gpt2", "gemma2", "cohere"))
    assert gpt2.dropout == 0.1
    assert gpt2.attention is not None
    assert (gpt2.attention.rotary, gpt2.attention.dropout) == (False, 0.1)
    assert gemma2.attention is not None
    assert (gemma2.attention.materialises_scores, gemma2.attention.window) == (True, 4096)
    assert cohere.is_parallel


def test_a_window_of_null_is_none() -> None:
    (block,) = shape_from_type("mistral", {"sliding_window": None}).kinds
    assert block.attention is not None
    assert block.attention.window is None


def test_aliases_are_the_same_value() -> None:
    one = shape_from_type("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4})
    other = shape_from_type("gpt2", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})
    assert one == other


def test_a_nested_text_config_is_read_as_transformers_reads_it() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    whole = shape_of({"model_type": "llama4", "text_config": sizes})
    assert whole.is_exact  # AutoModelForCausalLM builds the language model alone
    part = shape_of({"model_type": "llava", "text_config": {"model_type": "llama", **sizes}})
    assert part.num_parameters == shape_from_type("llama", sizes).num_parameters
    assert not part.is_exact
    assert "language model" in part.notes[0]


def test_an_unknown_type_with_llamas_keys_is_guessed_and_says_so() -> None:
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 96
    }  # fmt: skip
    shape = shape_of({"model_type": "brand_new", **sizes})
    assert shape.num_parameters == shape_from_type("llama", sizes).num_parameters
    assert not shape.is_exact
    assert "brand_new" in shape.notes[0]


def test_a_type_from_elsewhere_is_counted_as_its_kin() -> None:
    shape = shape_of({"model_type": "kimi_k2", "n_routed_experts": 384, "first_k_dense_replace": 1})
    assert (shape.model_type, shape.is_exact) == ("kimi_k2", False)
    assert shape.kind_counts == (1, 60)
    assert "deepseek_v3" in shape.notes[0]


def test_keys_of_older_files_are_read() -> None:
    old = {"model_type": "RefinedWeb", "n_head": 128, "n_head_kv": 8, "n_layer": 60, "hidden_size": 8192}
    shape = shape_of({**old, "new_decoder_architecture": True})
    assert shape.num_parameters == zoo.named("falcon-40b").num_parameters
    assert shape_of({"model_type": "bloom", "n_embed": 128}).hidden_size == 128


def test_a_config_that_transformers_does_not_build_is_refused_with_its_reason() -> None:
    with pytest.raises(ModelError, match="per-layer"):
        shape_from_type("llama", {"per_layer_config": {"1": {"intermediate_size": 40}}})


def test_a_derived_shape_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
    derived = shape_from_type("llama", sizes)
    (file,) = tmp_path.rglob("*.json")
    whole = file.read_text(encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(lookup, "_derived", lambda _: pytest.fail("derived twice"))
        assert shape_from_type("llama", sizes) == derived
    file.write_text(whole[:100], encoding="utf-8")  # cut short by a kill
    assert shape_from_type("llama", sizes) == derived
    assert file.read_text(encoding="utf-8") == whole


def test_an_unknown_type_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        shape_of({"model_type": "lama"})
    assert "llama" in caught.value.hint
    with pytest.raises(ModelError, match="no model_type"):
        shape_of({})


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"hidden_size": "wide"}, ModelError),
        ({"num_hidden_layers": 2.5}, ModelError),
        ({"num_hidden_layers": 10**9}, BadValueError),
        ({"intermediate_size": float("inf")}, ModelError),
        ({"vocab_size": None}, ModelError),
        ({"layer_types": ["full_attention"], "num_hidden_layers": 3}, ModelError),
    ],
)
def test_bad_values_are_named(sizes: dict[str, object], error: type[Exception]) -> None:
    key = next(iter(sizes))
    with pytest.raises(error, match=key):
        shape_from_type("qwen2", sizes)


_JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(allow_nan=True), st.text(max_size=5),
    st.lists(st.integers(0, 3), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=20)
@given(model_type=st.sampled_from(["llama", "gpt2", "mixtral", "deepseek_v3"]), data=st.data())
def test_whatever_a_config_holds_it_is_a_shape_or_a_sentence(model_type: str, data: st.DataObject) -> None:
    keys = sorted(CONFIG_MAPPING[model_type]().to_dict())
    junk = data.draw(st.dictionaries(st.sampled_from(keys), _JUNK, max_size=3))
    assert shape_or_hint(model_type, junk)


def shape_or_hint(model_type: str, junk: dict[str, object]) -> ModelShape | str:
    try:
        return shape_from_type(model_type, junk)
    except WeftError as error:
        return error.hint


def test_from_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    shapes: list[ModelShape] = [shape_from_path(tmp_path), shape_from_path(tmp_path / "config.json")]
    assert [shape.num_parameters for shape in shapes] == [124_439_808] * 2
    assert shapes[0].name == tmp_path.name


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_file_that_is_no_config(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigFileError):
        shape_from_path(tmp_path)
