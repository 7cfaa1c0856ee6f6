"""Silences other libraries' warnings. WEFT_DEBUG=1 shows them."""

from __future__ import annotations

import logging
import os
import warnings

# Libraries that log at import time, once per rank: kernels that were not built for this machine.
_CHATTY = ("torchao", "torch.utils._pytree", "transformers")


def quiet_libraries() -> None:
    if os.environ.get("WEFT_DEBUG", "0") not in ("", "0"):
        return
    warnings.simplefilter("ignore")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
