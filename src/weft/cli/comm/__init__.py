"""`weft comm`: collectives, measured and drawn."""
