"""The token table and the output head under tensor parallelism, both sharded by vocabulary.

A table is sharded only if no module but a sharded head shares its weight: any other reader needs all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.models.tp.roles import linear_facts

# subclasses of nn.Embedding whose forward is the table's row times a number
_SCALED = "ScaledWordEmbedding"


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Names of the sharded table and head; reasons, by module name, of those that are not sharded."""

    embedding: str | None
    head: str | None
    reasons: dict[str, str]


def find_ends(model: nn.Module, *, vocabulary: int, why_replicated: str | None = None) -> Ends:
    """The table and the head of `model`; `why_replicated` keeps both replicated."""
    names = {id(module): name for name, module in model.named_modules()}
    table, head = (called(model, getter) for getter in ("get_input_embeddings", "get_output_embeddings"))
    table_name, head_name = (None if end is None else names.get(id(end)) for end in (table, head))
    reasons: dict[str, str] = {}
    wrong_table = why_replicated or _wrong_table(table, table_name, vocabulary)
    wrong_head = why_replicated or _wrong_head(model, head, head_name, vocabulary)
    owners = {} if table is None else _owners(model, getattr(table, "weight", None))
    is_tied = head is not None and id(head) in owners
    if set(owners) - {id(table), id(head)}:
        wrong_table = wrong_table or "another module shares its weight"
        wrong_head = wrong_head or ("another module shares its weight" if is_tied else None)
    if is_tied and wrong_head:
        wrong_table = wrong_table or f"the head shares its weight and is replicated: {wrong_head}"
    if is_tied and wrong_table:
        wrong_head = wrong_head or f"the token table shares its weight and is replicated: {wrong_table}"
    if table_name is not None and wrong_table:
        reasons[table_name] = wrong_table
    if head_name is not None and wrong_head:
        reasons[head_name] = wrong_head
    return Ends(embedding=None if wrong_table else table_name, head=None if wrong_head else head_name, reasons=reasons)


def called(model: nn.Module, getter: str) -> Any:
    """The result of a Hugging Face accessor; None if the model has none."""
    try:
        found = getattr(model, getter)()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return found if isinstance(found, nn.Module) else None


def _wrong_table(table: Any, name: str | None, vocabulary: int) -> str | None:
    if name is None:
        return "get_input_embeddings() names no token table"
    is_plain = type(table) is nn.Embedding or (
        isinstance(table, nn.Embedding) and type(table).__name__.endswith(_SCALED)
    )
    if not is_plain or table._modules:
        return "it is not a plain table"
    if table.max_norm is not None:
        return "its rows are renormalised on each lookup"
    if table.num_embeddings != vocabulary:
        return "its number of rows is not vocab_size"
    return None


def _wrong_head(model: nn.Module, head: Any, name: str | None, vocabulary: int) -> str | None:
    facts = None if name is None else linear_facts(name, head)
    if facts is None:
        return "it is not a plain linear layer"
    if facts.outputs != vocabulary:
        return "its number of outputs is not vocab_size"
    if head.bias is not None and len(_owners(model, head.bias)) > 1:
        return "another module shares its bias"
    return None


def _owners(model: nn.Module, parameter: Any) -> dict[int, nn.Module]:
    """The modules that hold this parameter."""
    return {
        id(module): module
        for module in model.modules()
        if any(held is parameter for held in module._parameters.values()) and parameter is not None
    }
