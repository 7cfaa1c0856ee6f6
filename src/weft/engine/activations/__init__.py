"""Activations between forward and backward: recompute, split backward, layout-independent dropout."""
