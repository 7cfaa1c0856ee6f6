"""A model's stored tensors as one GGUF file: names by the `gguf` package's own map, weights in blocks of its formats.

    stored tensor -> name there (experts of a layer stacked) -> rows permuted, ones added (`gguf_families`) -> blocks

Vectors and routers stay float32, matrices whose rows do not divide into blocks float16. In gguf-q4_0 the table of
tokens and the head are q8_0. Tensors wait in a temporary file, not in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.core.errors import WeightsError
from weft.models.gguf_families import GgufFamily, family_of, notes_of
from weft.models.gguf_tokenizer import GgufTokenizer, NoGgufTokenizerError, gguf_tokenizer
from weft.models.hf_export import StoredStream, committed_folder, require_free
from weft.models.pretrained import unique_names

FORMATS = {"gguf-f16": "F16", "gguf-bf16": "BF16", "gguf-q8_0": "Q8_0", "gguf-q4_0": "Q4_0"}
FILE = "model.gguf"

_BLOCK = 32
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FLOAT32 = ("ffn_gate_inp", "norm")
_EIGHT_BITS = ("token_embd", "output.weight")  # in gguf-q4_0


def export_gguf(
    config: Any,
    tensors: Iterable[tuple[str, Tensor]],
    out: Path,
    *,
    kind: str,
    skeleton: PreTrainedModel,
    tokenizer: Path | None = None,
) -> dict[str, Any]:
    """Write `out`/model.gguf from full tensors under the model's own names; return what was written and kept.

    `tokenizer` is a folder with tokenizer.json; a tokenizer that GGUF has no form for is left out with a note.
    """
    require_free(out)
    file = GgufFile(config, kind)
    written, note = _tokenizer_of(tokenizer, vocab_size=config.vocab_size)
    with committed_folder(out) as folder:
        file.write(folder / FILE, StoredStream(skeleton).stored(tensors), written)
    notes = [*notes_of(config), *([note] if note else [])]
    kept = {"vectors and routers keep float32": ["norms"]}
    if file.record.kept:
        kept["rows do not divide into blocks: float16"] = list(file.record.kept)
    return {
        "format": kind,
        "quantised_parameters": file.record.quantised,
        "group_size": _BLOCK,
        "kept": kept,
        "notes": notes,
        "calibration": None,
    }


@dataclass
class GgufRecord:
    """What was written: numbers in blocks of the format, and names of matrices kept in float16."""

    quantised: int = 0
    kept: tuple[str, ...] = ()


class GgufFile:
    """Names, shapes and formats of a model's tensors in GGUF."""

    def __init__(self, config: Any, kind: str) -> None:
        try:
            import gguf
        except ImportError:
            raise WeightsError(
                "gguf is not installed, which writes GGUF files", hint="pip install 'weft-train[lowbit]'"
            ) from None
        self._gguf, self._config = gguf, config
        self._family: GgufFamily = family_of(config)
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self._family.arch)
        self._names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        self._type = gguf.GGMLQuantizationType[FORMATS[kind]]
        self._num_experts = _first(config, "num_experts", "num_local_experts") or 0
        self.record = GgufRecord()

    def write(self, path: Path, stored: Iterable[tuple[str, Tensor]], tokenizer: GgufTokenizer | None) -> None:
        """Write the file from tensors under their stored names."""
        writer = self._gguf.GGUFWriter(path, self._family.arch, use_temp_file=True)
        self._describe(writer)
        if tokenizer is not None:
            _write_tokenizer(writer, tokenizer)
        for name, tensor in self._stacked(stored):
            made = self._written(name, tensor)
            kind = self._kind(name, made)
            data = self._gguf.quants.quantize(made.float().contiguous().numpy(), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _stacked(self, stored: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, dict[int, Tensor]] = {}
        for key, tensor in stored:
            match = _EXPERT.search(key)
            if match is None:
                yield self._name(key), tensor
                continue
            name = self._name(_EXPERT.sub(".experts.", key))
            experts = waiting.setdefault(name, {})
            experts[int(match[1])] = tensor
            if len(experts) == self._num_experts:
                yield name, torch.stack([experts[place] for place in sorted(experts)])
                del waiting[name]
        if waiting:
            raise WeightsError(f"experts of {min(waiting)} are missing", hint="export the checkpoint again")

    def _name(self, key: str) -> str:
        # mixtral's merged experts are in the map under the names of its first publication
        others = (key, re.sub(r"^model\.", "", key).replace("block_sparse_moe", "feed_forward"))
        for one in others:
            name = self._names.get_name(one, try_suffixes=(".weight", ".bias"))
            if name is not None:
                return str(name)
        raise WeightsError(
            f"gguf has no name for {key} of {self._config.model_type} models", hint="choose int8, int4 or float8"
        )

    def _written(self, name: str, tensor: Tensor) -> Tensor:
        if self._family.permutes and ".attn_q." in name:
            return _pairs_together(tensor, self._config.num_attention_heads)
        if self._family.permutes and ".attn_k." in name:
            return _pairs_together(tensor, self._config.num_key_value_heads)
        if self._family.adds_one and name.endswith("norm.weight"):
            return tensor.float() + 1
        return tensor.squeeze(0) if name.endswith("ffn_gate_inp_shexp.weight") else tensor

    def _kind(self, name: str, tensor: Tensor) -> Any:
        kinds = self._gguf.GGMLQuantizationType
        if tensor.ndim == 1 or any(word in name for word in _FLOAT32):
            return kinds.F32
        if self._type in (kinds.F16, kinds.BF16):
            return self._type
        if tensor.shape[-1] % _BLOCK:
            self.record.kept += (name,)
            return kinds.F16
        self.record.quantised += tensor.numel()
        return kinds.Q8_0 if name.startswith(_EIGHT_BITS) else self._type

    def _describe(self, writer: Any) -> None:
        config, gguf = self._config, self._gguf
        writer.add_name(self._family.arch)
        writer.add_file_type(gguf.LlamaFileType["MOSTLY_" + self._type.name])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        if self._num_experts:
            writer.add_expert_count(self._num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            width = getattr(config, "moe_intermediate_size", None)
            if width:
                writer.add_expert_feed_forward_length(width)
            shared = getattr(config, "shared_expert_intermediate_size", None)
            if shared:
                writer.add_expert_shared_feed_forward_length(shared)
        if config.model_type == "gemma2":
            writer.add_sliding_window(config.sliding_window)
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _pairs_together(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from (first halves, second halves) to pairs, which readers rotate."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _write_tokenizer(writer: Any, tokenizer: GgufTokenizer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    if tokenizer.end is not None:
        writer.add_eos_token_id(tokenizer.end)
    if tokenizer.begin is not None:
        writer.add_bos_token_id(tokenizer.begin)
    writer.add_add_bos_token(tokenizer.adds_begin)


def measured_formats(config: Any) -> tuple[str, ...]:
    """The formats of fewer than 16 bits, if the family has a form that transformers reads too."""
    if find_spec("gguf") is None:
        return ()
    try:
        family = family_of(config)
    except WeightsError:
        return ()
    return ("gguf-q8_0", "gguf-q4_0") if family.is_read_by_transformers else ()


def load_gguf(folder: Path) -> PreTrainedModel:
    """The model of a file as transformers reads it, dequantised; raises where it reads less than the file has."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(folder, gguf_file=FILE, trust_remote_code=False)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # from_pretrained reads the same way, and wants accelerate, which it does not use
    found = load_gguf_checkpoint(str(folder / FILE), return_tensors=True, model_to_load=model)["tensors"]
    lost = set(unique_names(model)) - found.keys()
    if lost:
        raise WeightsError(f"transformers does not read {min(lost)} from GGUF", hint="other programs may")
    for name, value in found.items():  # assigned: transformers does not read the width of experts from the file
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._parameters[key] = nn.Parameter(value, requires_grad=False)
    model.tie_weights()
    return model


def _tokenizer_of(folder: Path | None, *, vocab_size: int) -> tuple[GgufTokenizer | None, str]:
    """The tokenizer to write, or why there is none."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None, "the file has no tokenizer: there is no tokenizer.json"
    settings = folder / "tokenizer_config.json"
    fields = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    try:
        return gguf_tokenizer(fields, config, vocab_size=vocab_size), ""
    except NoGgufTokenizerError as reason:
        return None, f"the file has no tokenizer: {reason}"


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None))), None)
