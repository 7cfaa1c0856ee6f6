"""Routers of mixtures: load of experts, balancing losses, bias of the choice."""
