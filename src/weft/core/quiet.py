"""Keeps other libraries' warnings out of weft's own lines. WEFT_DEBUG=1 lets them through."""

from __future__ import annotations

import logging
import os
import warnings

# Import-time remarks of optional libraries, once from every rank: kernels that were not built for this machine.
_CHATTY = ("torchao", "torch.utils._pytree", "transformers")


def quiet_libraries() -> None:
    if os.environ.get("WEFT_DEBUG", "0") not in ("", "0"):
        return
    warnings.simplefilter("ignore")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
