"""Which layout, will it fit, how fast and why: cost model, legality, search, explanation. Pure arithmetic, no torch.

It never looks at the engine: what both need is declared in core, hardware, zoo and schedule. Everything is loaded on
first use: importing this package costs nothing.
"""
