"""What every comparison over model types shares: tiny models of each type, their batches, bounds, and rows of results.

It runs nothing by itself: `tensor_families.py`, `pipeline_families.py` and `context_families.py` say what is compared.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from families_train import EXTRA, shrunk
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from type_groups import TYPES_A_GROUP

from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights, Reader
from weft.models.layout import describe

CPU = torch.device("cpu")
VOCABULARY, ROWS, LENGTH, STEPS = 257, 4, 16, 3
MOST_PARAMETERS = 50_000_000
# float32 sums in another order, through two layers: a thousand roundings at most; a bug is a share of the value
LOSS_BOUND, NORM_BOUND, GRADIENT_BOUND = 1e-5, 1e-4, 1e-4
SMALL_SHARE = 1e-3  # of the typical gradient: below it (a key's bias, whose true gradient is 0) there is only noise
COMPARED = (
    f"losses (relative {LOSS_BOUND:.0e}), gradient norms ({NORM_BOUND:.0e}), every first gradient"
    f" ({GRADIENT_BOUND:.0e} of its norm), an evaluation"
)
Facts = dict[str, Any]


class Jittered:
    """Initial weights whose vectors are moved a little: a bias that starts at zero, a norm at one would hide bugs."""

    def __init__(self, source: InitialWeights) -> None:
        self._source = source

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Reader]]:
        for name, read in self._source.readers(names):
            value = read(())
            if value.ndim <= 1 and value.is_floating_point():
                seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
                value = value + 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
            yield name, value.__getitem__


def config_of(
    model_type: str, *, num_layers: int = 2, given: Facts | None = None, fields_where_known: Facts | None = None
) -> Any:
    """Two layers or a multiple, width 64; two key-value heads where the type has them and builds so.

    `given` takes the fields that were asked for. `fields_where_known`: further ones, of configs that have them.
    """
    extra = {key: _deeper(key, value, num_layers // 2) for key, value in EXTRA.get(model_type, {}).items()}
    config_class = CONFIG_MAPPING[model_type]
    overrides = shrunk(config_class, num_layers=num_layers) | extra
    if fields_where_known:
        overrides = _with_known(overrides, _defaults(config_class), fields_where_known)
    is_latent = "qk_rope_head_dim" in overrides  # keys and values have the queries' heads
    grouped = {key: 2 for key in ("num_key_value_heads", "num_kv_heads") if key in overrides and not is_latent}
    for fields in ({**overrides, **grouped}, overrides):
        spec = ModelSpec(type=model_type, config=fields)
        try:
            config = build_config(spec, vocab_size=VOCABULARY, end_of_document=256)
            build_skeleton(copy.deepcopy(config))
            if given is not None:
                given.update(fields)
            return config
        except WeftError:
            if fields is overrides:
                raise
    raise AssertionError


def _defaults(config_class: Any) -> Facts:
    """The fields of a config; {} without a default, which `build_config` then says in a sentence."""
    try:
        return dict(config_class().to_dict())
    except Exception:  # transformers' and hub's own kinds
        return {}


def _with_known(overrides: Facts, defaults: Facts, fields: Facts) -> Facts:
    """`overrides` with those of `fields` that the config, or a part of it, has."""
    parts = {
        key: _with_known(value, defaults.get(key) or {}, fields)
        for key, value in overrides.items()
        if isinstance(value, dict) and key.endswith("_config")
    }
    return {**overrides, **parts, **{key: value for key, value in fields.items() if key in defaults}}


def _deeper(key: str, value: Any, times: int) -> Any:
    """What EXTRA says of two layers, for more of them."""
    if key in ("layer_types", "attn_layers", "activation_sparsity_pattern"):
        return value * times
    return [[kinds, count * times] for kinds, count in value] if key == "attention_types" else value


def engine_of(config: Any, tables: Facts) -> Engine:
    skeleton = build_skeleton(copy.deepcopy(config))
    if sum(parameter.numel() for parameter in skeleton.parameters()) > MOST_PARAMETERS:
        raise RuntimeError("this script's size fields do not make it small")
    source = build_skeleton(copy.deepcopy(config))
    return Engine(
        skeleton,
        Plan.from_tables(tables),
        optimizer=OptimizerPolicy(kind="sgd", learning_rate=0.05),
        weights=Jittered(InitialWeights(source, describe(source), seed=0, device=CPU)),
        device=CPU,
    )


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY - 1, (ROWS, LENGTH + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, :5] = -100
        made.append({"input_ids": ids[:, :-1].contiguous(), "labels": labels})
    return made


def course_of(engine: Engine, batches: list[dict[str, torch.Tensor]], gradients_of: Callable[..., Facts]) -> Facts:
    """Losses, norms and an evaluation; of the first step, what `gradients_of` makes of the gradients."""
    gradients: Facts = {}

    def keep(found: dict[str, torch.Tensor]) -> None:
        if not gradients:
            gradients.update({name: value.clone().numpy() for name, value in gradients_of(found).items()})

    engine.on_gradients = keep
    records = [engine.step(batch) for batch in batches]
    return {
        "losses": [record.loss for record in records] + [engine.evaluate(batches[0]).loss],
        "norms": [record.grad_norm for record in records],
        "gradients": gradients,
    }


def difference(truth: Facts, found: Facts) -> str:
    """The first wrong thing, or nothing."""
    for key, bound in (("losses", LOSS_BOUND), ("norms", NORM_BOUND)):
        for step, (right, value) in enumerate(zip(truth[key], found[key], strict=True), start=1):
            if not abs(value - right) <= bound * abs(right):
                where = "evaluation" if step > STEPS else f"step {step}"
                return f"{key[:-1]} of {where} {value:.6f}, not {right:.6f}"
    missing = sorted(set(truth["gradients"]) ^ set(found["gradients"]))
    if missing:
        return f"a gradient of {missing[0]} on one side only"
    tensors = {name: torch.from_numpy(value).double() for name, value in truth["gradients"].items()}
    typical = torch.stack([value.norm() for value in tensors.values()]).square().mean().sqrt().item()
    worst = max(
        ((torch.from_numpy(found["gradients"][name]).double() - right).norm().item()
         / (right.norm().item() + SMALL_SHARE * typical), name)
        for name, right in tensors.items()
    )  # fmt: skip
    return f"gradient of {worst[1]} off by {worst[0]:.1e}" if worst[0] > GRADIENT_BOUND else ""


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])[:300]


def cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:400]


def page_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of the benchmarks that write a result and a page of all types."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", type=Path)
    parser.add_argument(
        "--rows", type=Path, help="a JSON line for each type as it is done; types in it are not repeated"
    )
    parser.add_argument("--types", nargs="*")
    return parser


def counted(rows: list[Facts]) -> str:
    counts = Counter(row["verdict"] for row in rows)
    words = (("right", ""), ("refused", " with a sentence"), ("WRONG", ""), ("not built", " even in one process"),
             ("alike", " without the feature too"))  # fmt: skip
    return ", ".join(f"{counts[verdict]} {verdict}{rest}" for verdict, rest in words if counts[verdict])


def write_pages(
    given: argparse.Namespace,
    judged: Callable[[list[str]], Iterator[Facts]],
    *,
    result_page: Callable[[list[Facts]], str],
    docs_page: Callable[[list[Facts]], str],
) -> None:
    """Judge every type that has no row yet, group by group; then both pages. A type that is WRONG fails the script."""
    done = read_rows(given.rows)
    left = [name for name in given.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name not in done]
    for begin in range(0, len(left), TYPES_A_GROUP):
        for row in judged(left[begin : begin + TYPES_A_GROUP]):
            done[row["type"]] = row
            keep_row(given.rows, row)
            print(f"{row['type']:26} {row['verdict']:9} {row.get('blocks', '')} {row['why'][:200]}", flush=True)
    rows = [done[name] for name in sorted(done)]
    if given.out:
        given.out.write_text(result_page(rows), encoding="utf-8")
    if given.docs:
        given.docs.write_text(docs_page(rows), encoding="utf-8")
    if any(row["verdict"] == "WRONG" for row in rows):
        raise SystemExit(1)


def refused_and_right(rows: list[Facts], *, title: str) -> list[str]:
    """The part of a page that lists types by their verdict; `title` is that of the first list."""
    return [
        f"## {title}",
        "",
        "| type | why |",
        "| --- | --- |",
        *(f"| {row['type']} | {cell(row['why'])} |" for row in rows if row["verdict"] != "right"),
        "",
        "## Right",
        "",
        ", ".join(row["type"] for row in rows if row["verdict"] == "right"),
    ]


def keep_row(path: Path | None, row: Facts) -> None:
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path | None) -> dict[str, Facts]:
    if path is None or not path.exists():
        return {}
    return {row["type"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
