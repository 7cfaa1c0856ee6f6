"""Every tolerance of the tests, with its origin. None is written inline.

float32 has 24 bits: one rounding is 6e-8 relative. A loss is a sum over a few thousand tokens, a norm over every
parameter; another order of summation moves them by a few roundings, and twenty optimizer steps let that grow.
"""

# Twenty steps, any data-parallel layout against one process, in float32 (the expected of the README).
SAME_CURVE_LOSS_ABS = 1e-5
SAME_CURVE_NORM_REL = 1e-5

# One forward and backward in float32 against a plain loop: a few roundings.
SAME_STEP_REL = 2e-6

# bfloat16 has 8 bits (4e-3 relative a rounding); a loss near 5.8 averaged over tokens stays within a few of them.
BF16_LOSS_ABS = 2e-2

# Two layouts of the same bfloat16 run: the same roundings in another order of float32 sums, then twenty updates.
BF16_SAME_LOSS_ABS = 2e-3

# float32 on a GPU sums matrix products in another order than a CPU (and may use other exponentials): ten steps.
GPU_FP32_LOSS_ABS = 5e-5

# The sampling error of an estimate (a standard deviation, a drop rate), in its own standard errors: 1 in 5e8 by chance.
SAMPLING_SIGMAS = 6.0

# A row computed alone or in a batch, in float32: matrix products of another height sum in another order.
SAME_ROW_ABS = 5e-6

# AdamW divides by the root of a second moment quantised to 8 bits: a rounding of the gradient can move a code by one
# (1/256 of a block's largest), and so a weight by a fraction of the learning rate in each of a few steps.
LOWBIT_SAME_LOSS_ABS = 1e-4

# A norm of a few thousand numbers in float32 against float64.
SAME_NORM_REL = 1e-6

# Logits of a document inside a longer row against those of the document alone, relative to the largest: the same
# sums in float32 over matrices of another size, through a few layers with wide weights.
SAME_LOGITS_REL = 5e-5

# Two writings of one AdamW update with 8-bit moments in float32: weights to a rounding of the update, moments to a
# rounding of their scale, but for the few codes that a last bit makes fall on the other side.
SAME_LOWBIT_WEIGHT_ABS = 1e-6
SAME_LOWBIT_MOMENT_REL = 1e-5
FLIPPED_CODES_SHARE = 0.01

# AdamW with bfloat16 moments against float64, fifty steps: a stored moment is off by at most one step of the format
# (2^-7 relative), of random sign, and the next updates mix about ten such errors; a weight sums fifty errors that
# mostly cancel. Weights rounded themselves walk: the root of the number of steps, times half a step of the format.
LOW_MOMENT_REL = 2.0**-7
LOW_UPDATE_REL = 2.0**-7
LOW_WEIGHT_STEP = 2.0**-8
