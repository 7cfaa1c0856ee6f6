"""Data: sources to documents, documents to tokens, tokens to batches that do not depend on the layout.

The way through: `open_corpus` (sources, tokenizers, building, store, split), then `Loader` (order, rows). Nothing here
knows of meshes or process groups: ranks are two numbers, and processes wait for each other's files.
Names are imported when first used: sources and tokenizers are looked at before a command imports torch.
"""

from typing import TYPE_CHECKING

from weft.core.lazy_names import import_when_used

if TYPE_CHECKING:
    from weft.data.corpus import Corpus, default_cache_dir, open_corpus
    from weft.data.loader import Loader
    from weft.data.split import Split
    from weft.data.tokenizers import Tokenizer, find_tokenizer, open_tokenizer

_HOMES = {
    "Corpus": "weft.data.corpus",
    "Loader": "weft.data.loader",
    "Split": "weft.data.split",
    "Tokenizer": "weft.data.tokenizers",
    "default_cache_dir": "weft.data.corpus",
    "find_tokenizer": "weft.data.tokenizers",
    "open_corpus": "weft.data.corpus",
    "open_tokenizer": "weft.data.tokenizers",
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


__getattr__ = import_when_used(__name__, _HOMES)
