"""Fused and low-precision computation: attention, head and loss, float8 and compiled blocks."""
