"""Shrink a run without changing its structure: fewer layers of each kind, narrower where it divides, short rows.

Every change is reported. Ratios of heads, the pattern of layer kinds, ties, norms, gates and routing stay as they are.
If the model does not build at the reduced width, the reduction is halved until it does.
"""

from __future__ import annotations

from typing import Any

from weft.core.errors import ModelError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.models.adapter.targets import matching_parameters, matching_patterns
from weft.models.build import build_config, build_skeleton

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
INNER_KEYS = ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads")
KEY_VALUE_KEYS = ("num_key_value_heads", "num_kv_heads")
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
PER_LAYER_KEYS = ("layer_types", "mlp_layer_types")
POSITION_KEYS = ("n_positions", "max_position_embeddings")

SMALL_WIDTH = 64
SMALL_LENGTH = 32
MIN_EXPERTS = 4


def shrink(run: RunSpec, plan: Plan, *, vocab_size: int) -> tuple[RunSpec, list[str]]:
    """The small run, and the list of changes."""
    small, changes = _smaller(run, plan, vocab_size=vocab_size)
    return _with_adapter_of(small, vocab_size=vocab_size), changes


def _with_adapter_of(run: RunSpec, *, vocab_size: int) -> RunSpec:
    """The run with those patterns of its adapter that match the small model, and with drawn factors."""
    if not run.adapter.is_on:
        return run
    model = build_skeleton(build_config(run.model, vocab_size=vocab_size), attention=run.model.attention)
    targets, also = matching_patterns(model, run.adapter.targets), matching_parameters(model, run.adapter.train_also)
    adapter = run.adapter.model_copy(update={"targets": targets, "train_also": also, "path": None})
    return run.model_copy(update={"adapter": adapter})


def _smaller(run: RunSpec, plan: Plan, *, vocab_size: int) -> tuple[RunSpec, list[str]]:
    config = build_config(run.model, vocab_size=vocab_size).get_text_config()
    stages, listed = plan.mesh.pp * plan.pipeline.virtual_stages, sum(plan.pipeline.blocks or ())
    policies = 3 if plan.activations.policy == "budget" else 2  # of blocks: saved, fully or selectively recomputed
    depth = _depth(config, least=max(policies, stages, listed))
    factor = _width_factor(config, tp=plan.mesh.tp)
    while factor >= 1:
        overrides = {**depth, **_narrow(config, factor, tp=plan.mesh.tp, ep=plan.mesh.ep)}
        model = run.model.model_copy(update={"config": {**run.model.config, **overrides}, "weights": "random"})
        small = run.model_copy(update={"model": model})
        if not overrides or _builds(small, vocab_size=vocab_size):
            changes = [_change(config, key, value) for key, value in overrides.items()]
            return _few_positions(*_short_rows(small, plan, changes), vocab_size=vocab_size)
        factor //= 2
    return _few_positions(*_short_rows(run, plan, []), vocab_size=vocab_size)


def _change(config: Any, key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{key}: the first {len(value)} of {len(getattr(config, key))}"
    return f"{key} {getattr(config, key)} -> {value}"


def _depth(config: Any, *, least: int) -> dict[str, Any]:
    """The smallest depth with every kind of layer and a layer for every pipeline stage."""
    key = _present(config, LAYER_KEYS)
    if key is None:
        return {}
    depth = getattr(config, key)
    wanted = least
    for kinds_key in PER_LAYER_KEYS:
        kinds = getattr(config, kinds_key, None)
        if isinstance(kinds, list):
            wanted = max(wanted, max(kinds.index(kind) for kind in set(kinds)) + 1)
    wanted = max(wanted, int(getattr(config, "first_k_dense_replace", 0) or 0) + 1)
    if wanted >= depth:
        return {}
    overrides: dict[str, Any] = {key: wanted}
    for kinds_key in PER_LAYER_KEYS:
        if isinstance(getattr(config, kinds_key, None), list):
            overrides[kinds_key] = getattr(config, kinds_key)[:wanted]
    return overrides


def _width_factor(config: Any, *, tp: int) -> int:
    """The largest power of two that leaves a width of SMALL_WIDTH and divides both heads and key-value heads.

    Heads that divide evenly over tensor-parallel ranks still do afterwards.
    """
    width = _present(config, WIDTH_KEYS)
    counts = [getattr(config, key) for key in (_present(config, HEAD_KEYS), _present(config, KEY_VALUE_KEYS)) if key]
    factor = 1
    while (
        width is not None
        and getattr(config, width) // (factor * 2) >= SMALL_WIDTH
        and all(_stays_even(count, factor * 2, tp=tp) for count in counts)
    ):
        factor *= 2
    return factor


def _stays_even(count: int, factor: int, *, tp: int) -> bool:
    """Whether `factor` divides `count` and the result divides over `tp` ranks as evenly as before.

    Key-value heads that are fewer than ranks are repeated: their number must divide the ranks.
    """
    if count % factor:
        return False
    left = count // factor
    return left % tp == 0 or (count % tp != 0 and (tp % count != 0 or tp % left == 0))


def _narrow(config: Any, factor: int, *, tp: int, ep: int) -> dict[str, int]:
    """Divide widths and heads by `factor`, which keeps the head size; reduce experts to a few."""
    overrides: dict[str, int] = {}
    for key in (*WIDTH_KEYS, *INNER_KEYS, *HEAD_KEYS, *KEY_VALUE_KEYS):
        value = getattr(config, key, None)
        if _is_own(config, key) and isinstance(value, int) and _stays_even(value, factor, tp=tp):
            overrides[key] = value // factor
    for key in EXPERT_KEYS:
        value = getattr(config, key, None)
        if _is_own(config, key) and isinstance(value, int) and value > MIN_EXPERTS:
            overrides[key] = _few_experts(config, value, ep=ep)
    return {key: value for key, value in overrides.items() if value < getattr(config, key)}


def _few_experts(config: Any, count: int, *, ep: int) -> int:
    """Twice the experts of a token and of ranks at least; equal groups where the router first chooses among groups."""
    top_k = int(getattr(config, "num_experts_per_tok", 1) or 1)
    least = max(MIN_EXPERTS, 2 * top_k, 2 * ep)
    groups, chosen = (int(getattr(config, key, 1) or 1) for key in ("n_group", "topk_group"))
    if groups > 1:  # a group is judged by two of its experts
        return groups * max(2, -(-least // groups), -(-top_k // chosen))
    return -(-least // ep) * ep + count % ep  # spans that are uneven stay so


def _short_rows(run: RunSpec, plan: Plan, changes: list[str]) -> tuple[RunSpec, list[str]]:
    chunks = plan.mesh.dp_degree * plan.pipeline.microbatches
    rows = max(chunks, -(-8 // chunks) * chunks)
    tp = plan.mesh.tp
    length = min(run.data.sequence_length, max(SMALL_LENGTH // tp * tp, tp))  # sequence parallel shards it by tp
    if run.train.global_batch > rows:
        changes.append(f"global_batch {run.train.global_batch} -> {rows}")
        run = run.model_copy(update={"train": run.train.model_copy(update={"global_batch": rows})})
    if run.data.sequence_length > length:
        changes.append(f"sequence_length {run.data.sequence_length} -> {length}")
        run = run.model_copy(update={"data": run.data.model_copy(update={"sequence_length": length})})
        if run.data.row_packing != "concatenate" and run.data.row_truncation != "split":
            # what counts is mostly at the end of a sample: short rows keep that
            changes.append(f"truncation {run.data.row_truncation} -> start")
            run = run.model_copy(update={"data": run.data.model_copy(update={"truncation": "start"})})
    return run, changes


def _few_positions(run: RunSpec, changes: list[str], *, vocab_size: int) -> tuple[RunSpec, list[str]]:
    """Shorten a learned position table to the row length, so that every position is used, the last one too."""
    config, length = build_config(run.model, vocab_size=vocab_size), run.data.sequence_length
    key = _present(config, POSITION_KEYS)
    if key is None or getattr(config, key) <= length or not _learns_positions(run, key, vocab_size=vocab_size):
        return run, changes
    model = run.model.model_copy(update={"config": {**run.model.config, key: length}})
    small = run.model_copy(update={"model": model})
    if not _builds(small, vocab_size=vocab_size):
        return run, changes
    return small, [*changes, _change(config, key, length)]


def _learns_positions(run: RunSpec, key: str, *, vocab_size: int) -> bool:
    """Whether `key` is the size of a table: with one position fewer a parameter has one row fewer."""
    shapes = []
    for fewer in (0, 1):
        config = build_config(run.model, vocab_size=vocab_size)
        setattr(config, key, getattr(config, key) - fewer)
        skeleton = build_skeleton(config, attention=run.model.attention)
        shapes.append({name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()})
    return any(shape[0] == shapes[1][name][0] + 1 for name, shape in shapes[0].items() if len(shape) == 2)


def _builds(run: RunSpec, *, vocab_size: int) -> bool:
    try:
        build_skeleton(build_config(run.model, vocab_size=vocab_size), attention=run.model.attention)
    except ModelError:
        return False
    return True


def _present(config: Any, keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if _is_own(config, key) and isinstance(getattr(config, key, None), int)), None)


def _is_own(config: Any, key: str) -> bool:
    """Whether the config stores the key itself: an alias of another key would be set twice."""
    return key in config.to_dict()
