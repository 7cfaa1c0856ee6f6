"""Data: sources to documents, documents to tokens, tokens to batches that do not depend on the layout.

The way through: `open_corpus` (sources, tokenizers, store, split), then `Loader` (order, rows). Nothing here knows
of meshes or process groups: ranks are two numbers, and waiting is a function passed in.
"""

from weft.data.corpus import Corpus, default_cache_dir, open_corpus
from weft.data.loader import Loader
from weft.data.split import Split
from weft.data.tokenizers import Tokenizer, find_tokenizer, open_tokenizer

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
