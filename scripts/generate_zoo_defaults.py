"""Writes src/weft/zoo/data/defaults.json: what each causal-LM config of the installed transformers says by default.

Not part of the package: it imports transformers so that the package need not. Run it after raising transformers:
    python scripts/generate_zoo_defaults.py          (a test compares the file with the installed transformers)
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "src" / "weft" / "zoo" / "data" / "defaults.json"

# values that change no size, no cost and no choice of module
_IRRELEVANT = re.compile(
    r"token|_eps$|^eps$|epsilon|initializer|init_std|use_cache|aux_loss|^summary_|^forced_|transformers_version"
    r"|architectures|^output_(hidden|attentions|router)|return_dict|^dtype$|id2label|label2id|problem_type|classifier_(dropout|activation)|pretraining_tp"
    r"|(^|mamba_)chunk_size|_start_n_top|^rope_|^image_|^video_|^audio_|^vision_|^time_step_(min|max|floor|limit|scale)"
    r"|^is_encoder_decoder$|routed_scaling|^early_stopping|^encoder_(layers|ffn_dim|attention_heads|layerdrop)$"
    r"|^mask_|^apply_spec|^boi_|^eoi_|^boa_|^eoa_|^ctc_|^median_filter|^max_source|_coef"
)
_RELEVANT_FLOATS = re.compile(r"drop|softcap|expand|expansion|mult|factor|fraction|ratio|size|dim|width|layerdrop")
_MAX_LIST = 64


def main() -> None:
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(render(collect()), encoding="utf-8")


def collect() -> dict[str, dict[str, Any]]:
    """model type -> {"defaults": fields, "aliases": attribute map, "nested", "text": where a text config is}."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, dict[str, Any]] = {}
    for model_type in sorted(CONFIG_MAPPING):
        cls = CONFIG_MAPPING[model_type]
        is_causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        nested = _text_type(cls)
        is_text_part = cls.base_config_key == "text_config"
        if is_causal or nested or is_text_part:
            found[model_type] = describe(cls, is_whole=is_causal or is_text_part) | nested
            if is_causal and nested and _takes_text_alone(model_type, cls):
                found[model_type]["text_only"] = True
    for parent in list(found):
        for model_type, cls in _sub_types(CONFIG_MAPPING[parent]).items():
            found.setdefault(model_type, describe(cls, is_whole=True))
    return dict(sorted(found.items()))


def describe(cls: Any, *, is_whole: bool) -> dict[str, Any]:
    """One config class. A parent of a text config that is no causal LM itself needs nothing of its own."""
    fields = {name: value for name, value in _fields(cls) if _matters(name, value)} if is_whole else {}
    aliases = dict(cls.attribute_map) if is_whole else {}
    return {"defaults": fields} | ({"aliases": aliases} if aliases else {})


def render(found: dict[str, dict[str, Any]]) -> str:
    """One type a line, after a line with the version they were read from."""
    import transformers

    entries = {"": {"transformers": transformers.__version__}} | found
    lines = [f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _fields(cls: Any) -> list[tuple[str, Any]]:
    result = []
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            result.append((field.name, field.default))
        elif field.default_factory is not dataclasses.MISSING:
            result.append((field.name, field.default_factory()))
    return result


def _matters(name: str, value: Any) -> bool:
    if _IRRELEVANT.search(name) and name not in ("layer_types", "mlp_layer_types", "type_vocab_size"):
        return False
    if isinstance(value, float):
        return _RELEVANT_FLOATS.search(name) is not None
    if isinstance(value, (list, tuple)):
        return len(value) <= _MAX_LIST and all(isinstance(item, (bool, int, str)) for item in value)
    return value is None or isinstance(value, (bool, int, str))


def _text_type(cls: Any) -> dict[str, Any]:
    for key in ("text_config", "decoder", "thinker_config"):
        if key in cls.sub_configs:
            spec = cls.sub_configs_defaults.get(key) if hasattr(cls, "sub_configs_defaults") else None
            kind = getattr(spec, "model_type", None) or getattr(cls.sub_configs[key], "model_type", "")
            own = {name: value for name, value in getattr(spec, "init_kwargs", {}).items() if _matters(name, value)}
            return {"nested": key, "text": kind} | ({"text_defaults": own} if own else {})
    return {}


def _takes_text_alone(model_type: str, cls: Any) -> bool:
    """Whether AutoModelForCausalLM builds only the language model of a nested config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[cls]
    return getattr(model_class, "config_class", None) is cls.sub_configs.get("text_config", "")


def _sub_types(cls: Any) -> dict[str, Any]:
    kinds = {key: kind for key, kind in cls.sub_configs.items() if key in ("text_config", "decoder")}
    return {kind.model_type: kind for kind in kinds.values() if getattr(kind, "model_type", "")}


if __name__ == "__main__":
    main()
