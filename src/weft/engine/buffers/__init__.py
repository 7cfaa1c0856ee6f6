"""Module buffers that forwards change, and batch norms over data-parallel ranks."""
