"""Seconds per step: compute, links, float8, overlap."""
