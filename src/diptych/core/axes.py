"""The letters of tensor names, defined once.

A tensor local is named after its axes: `patches_PD` is [P, D]. Mesh dimensions are called axes too
and have lower-case names: `dp`, `shard`, `tp`, `pp`, `cp`; `ep` is reserved.

B  rows of a micro-batch
S  tokens of a row, padding included
K  samples of a packed row, up to the most that a row of the micro-batch has
L  label tokens of a micro-batch
V  vocabulary
D  width of a feature
I  images of a micro-batch
P  patches of a micro-batch (every image's grid, one after the other), or its tiles
T  image tokens of a micro-batch (P divided by the square of the merge size)
"""

NUM_CHANNELS = 3
"""Red, green, blue."""

IGNORED_LABEL = -100
"""The label of a token that carries no loss, as in torch's cross_entropy."""
