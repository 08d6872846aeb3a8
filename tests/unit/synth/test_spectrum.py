"""The variance of the stream's columns: the same shares at every width."""

import numpy as np
import pytest

from polyneuron.synth.spectrum import block_variances, variance_share

WIDTHS = [1, 2, 3, 11, 17, 127, 159]


@pytest.mark.parametrize("num_blocks", WIDTHS)
def test_variances_fall_and_have_mean_one(num_blocks: int) -> None:
    variances = block_variances(num_blocks)
    assert variances.shape == (num_blocks,)
    assert variances.mean() == pytest.approx(1.0)
    assert np.all(variances > 0) and np.all(np.diff(variances) < 0)


@pytest.mark.parametrize("num_blocks", [12, 40, 128])
def test_a_quarter_of_the_columns_has_97_percent(num_blocks: int) -> None:
    variances = block_variances(num_blocks)
    assert variances[: num_blocks // 4].sum() / num_blocks == pytest.approx(0.97, abs=0.001)


def test_shares_are_those_of_the_page() -> None:
    found = variance_share(np.array([0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]))
    assert found == pytest.approx([0.0, 0.78, 0.91, 0.97, 0.99, 1.0], abs=0.005)


def test_columns_that_count() -> None:
    """As many of equal variance would vary as much together: 7 % of a 7B model's."""
    variances = block_variances(127)
    assert variances.sum() ** 2 / np.square(variances).sum() / 127 == pytest.approx(0.07, abs=0.002)
