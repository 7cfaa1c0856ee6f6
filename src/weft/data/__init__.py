"""Data: sources to documents, documents to tokens, tokens to batches that do not depend on the layout.

The way through: `open_corpus` (sources, tokenizers, building, store, split), then `Loader` (order, rows). Nothing here
knows of meshes or process groups: ranks are two numbers, and processes wait for each other's files.
Names are imported when first used: sources and tokenizers are looked at before a command imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.data.corpus import Corpus, default_cache_dir, open_corpus
    from weft.data.loader import Loader
    from weft.data.split import Split
    from weft.data.tokenizers import Tokenizer, find_tokenizer, open_tokenizer

_HOME = {
    "Corpus": "corpus",
    "Loader": "loader",
    "Split": "split",
    "Tokenizer": "tokenizers",
    "default_cache_dir": "corpus",
    "find_tokenizer": "tokenizers",
    "open_corpus": "corpus",
    "open_tokenizer": "tokenizers",
}

__all__ = [
    "Corpus",
    "Loader",
    "Split",
    "Tokenizer",
    "default_cache_dir",
    "find_tokenizer",
    "open_corpus",
    "open_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"weft.data.{_HOME[name]}"), name)
    raise AttributeError(f"module 'weft.data' has no attribute {name!r}")
