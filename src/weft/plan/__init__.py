"""The planner: cost model, legality, search and explanation of layouts. Pure arithmetic, no torch.

It does not import the engine: facts that both need are in core, hardware, zoo and schedule. Modules are loaded on first
use.
"""
