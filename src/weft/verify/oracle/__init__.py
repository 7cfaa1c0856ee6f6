"""The oracle: checks the code that plan and reference share, with code that shares nothing with them.

It imports torch, transformers, numpy, the standard library, and from weft only the verdict and the bounds; a contract
test checks this. It compares with transformers' own model, loss, initial values and `from_pretrained`, and formulas.
"""

from weft.verify.oracle.facts import CorpusFacts, LoopFacts, MixtureFacts, RankShare, RunFacts, Saved, SourceFacts
from weft.verify.oracle.judge import Oracle

__all__ = ["CorpusFacts", "LoopFacts", "MixtureFacts", "Oracle", "RankShare", "RunFacts", "Saved", "SourceFacts"]
