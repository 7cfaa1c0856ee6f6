"""`weft launch`: its arguments, and the request that they make."""
