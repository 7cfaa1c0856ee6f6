"""Seconds of a step: arithmetic, links, float8, overlap."""
