"""Every tolerance of the tests, with its origin. None is written inline.

float32 has 24 bits: one rounding is 6e-8 relative. A loss is a sum over a few thousand tokens, a norm over every
parameter; another order of summation moves them by a few roundings, and twenty optimizer steps let that grow.
"""

# Twenty steps, any data-parallel layout against one process, in float32 (the promise of the README).
SAME_CURVE_LOSS_ABS = 1e-5
SAME_CURVE_NORM_REL = 1e-5

# One forward and backward in float32 against a plain loop: a few roundings.
SAME_STEP_REL = 2e-6

# bfloat16 has 8 bits (4e-3 relative a rounding); a loss near 5.8 averaged over tokens stays within a few of them.
BF16_LOSS_ABS = 2e-2

# Two layouts of the same bfloat16 run: the same roundings in another order of float32 sums, then twenty updates.
BF16_SAME_LOSS_ABS = 2e-3
