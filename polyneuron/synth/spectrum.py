"""How the residual stream's variance falls over its columns, so that a low rank explains most.

At every width the same fraction of the columns has the same share of the variance. The constants
are a choice: docs/SYNTH.md compares them with a real model and with published predictors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

DECAY = 3.0
"""Of the power law of a column's variance in its place, from the knee on."""
KNEE = 0.055
"""As a fraction of the columns: a quarter of them has 97 % of the variance."""


def variance_share(fraction: F64) -> F64:
    """The share of all variance in the first columns; fraction (n): 0 to 1, of the columns.

    The integral of (1 + t / KNEE) ^ -DECAY over t from 0 to fraction, of that from 0 to 1.
    """
    ends = np.append(fraction, 1.0)
    integrals: F64 = 1.0 - (1.0 + ends / KNEE) ** (1.0 - DECAY)
    shares: F64 = integrals[:-1] / integrals[-1]
    return shares


def block_variances(num_blocks: int) -> F64:
    """Variance of a column in each block (num_blocks), falling, with mean 1."""
    edges = np.arange(num_blocks + 1) / num_blocks
    variances: F64 = num_blocks * np.diff(variance_share(edges))
    return variances
