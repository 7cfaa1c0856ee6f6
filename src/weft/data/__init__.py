"""Data: sources to documents, documents to tokens, tokens to batches that do not depend on the layout.

The order: `open_corpus` (sources, tokenizers or encoders of samples, building, store, split), then `Loader` (order,
rows), or `StreamingLoader`. There are no meshes or process groups here: a rank is two numbers, and processes wait for
each other's files. Names are imported at first use: commands check sources and tokenizers before they import torch.
"""

from typing import TYPE_CHECKING

from weft.core.lazy_names import import_when_used

if TYPE_CHECKING:
    from weft.data.corpus import Corpus as Corpus
    from weft.data.corpus import default_cache_dir as default_cache_dir
    from weft.data.loader import Loader as Loader
    from weft.data.opening import open_corpus as open_corpus
    from weft.data.split import Split as Split
    from weft.data.tokenizers import Tokenizer as Tokenizer
    from weft.data.tokenizers import find_tokenizer as find_tokenizer
    from weft.data.tokenizers import open_tokenizer as open_tokenizer

_HOMES = {
    "Corpus": "weft.data.corpus",
    "Loader": "weft.data.loader",
    "Split": "weft.data.split",
    "Tokenizer": "weft.data.tokenizers",
    "default_cache_dir": "weft.data.corpus",
    "find_tokenizer": "weft.data.tokenizers",
    "open_corpus": "weft.data.opening",
    "open_tokenizer": "weft.data.tokenizers",
}

__all__ = sorted(_HOMES)

__getattr__ = import_when_used(__name__, _HOMES)
