"""Names for the two arrays that travel everywhere: int64 keys (slots and positions too) and float32 rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]
