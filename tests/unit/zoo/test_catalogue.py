"""The zoo of named models: published parameter counts, forgiving names, errors that help."""

from collections import Counter

import pytest

from weft import zoo
from weft.core.errors import ModelError
from weft.zoo.catalogue import _answers_to, _files, _load

# as the model cards and safetensors indices state them
_PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "pythia-70m": 70_426_624,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "mpt-7b": 6_649_286_656,
    "granite-3.0-2b": 2_533_531_648,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "tinyllama-1.1b": 1_100_048_384,
    "mamba-130m": 129_135_360,
    "jamba-v0.1": 51_570_323_328,
}
# billions in table 1 of arXiv 2104.04473
_SC21 = [1.7, 3.6, 7.5, 18.4, 39.1, 76.1, 145.6, 310.1, 529.6, 1008.0]


@pytest.mark.parametrize(("name", "parameters"), sorted(_PUBLISHED.items()))
def test_published_counts(name: str, parameters: int) -> None:
    shape = zoo.named(name)
    assert shape.num_parameters == parameters
    assert shape.is_exact


def test_deepseek_v3_lacks_only_its_router_corrections() -> None:
    """The published 671,026,419,200 counts e_score_correction_bias, which transformers keeps as a buffer."""
    shape = zoo.named("deepseek-v3")
    corrections = sum(kind.moe.num_experts for kind in (shape.kinds[index] for index in shape.order) if kind.moe)
    assert shape.num_parameters + corrections == 671_026_419_200


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22.2), ("deepseek-v3", 37.5)],
)
def test_active_parameters_are_those_of_the_model_card(name: str, billions: float) -> None:
    assert zoo.named(name).num_active_parameters / 1e9 == pytest.approx(billions, abs=0.1)


def test_the_models_of_the_megatron_table() -> None:
    found = [zoo.named(f"megatron-{size}b").num_parameters / 1e9 for size in
             ("1.7", "3.6", "7.5", "18.4", "39.1", "76.1", "145.6", "310.1", "530", "1008")]  # fmt: skip
    assert [round(size, 1) for size in found] == pytest.approx(_SC21, abs=0.051)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("LLAMA_3_8B", "llama-3-8b"),
        ("llama-3-405b", "llama-3.1-405b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("gpt2-1.5b", "gpt2-xl"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
    ],
)
def test_names_are_forgiving(spelling: str, name: str) -> None:
    assert zoo.named(spelling).name == name


def test_a_dot_is_not_forgotten() -> None:
    """1.5b and 15b are two models."""
    assert zoo.named("qwen2.5-1.5b").num_parameters != zoo.named("starcoder2-15b").num_parameters
    with pytest.raises(ModelError):
        zoo.named("qwen2.5-15b")


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        zoo.named("llama-3-9b")
    assert "llama-3-8b" in caught.value.hint
    assert caught.value.code == "W301"


def test_no_two_models_answer_to_one_spelling() -> None:
    spellings = Counter(
        spelling for file in _files() for key, entry in _load(file).items() for spelling in _answers_to(key, entry)
    )
    assert [spelling for spelling, count in spellings.items() if count > 1] == []


@pytest.mark.parametrize("name", zoo.names())
def test_every_model_is_exact(name: str) -> None:
    shape = zoo.named(name)
    assert shape.is_exact
    assert shape.num_active_parameters <= shape.num_parameters
