"""A round of the secure sum from keys to the mean."""

from __future__ import annotations

import numpy as np
import pytest

from metis.core.secure_sum import threshold
from privacy.cohort import SCALARS, Cohort


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("count", [3, 4, 7, 10])
def test_the_opened_sum_is_the_plain_one_whoever_drops_out(count: int, bits: int) -> None:
    """N - t learners may upload nothing, and N - t others may not answer."""
    cohort = Cohort(count, bits=bits)
    opening, gone = cohort.opening(), count - threshold(count)
    opener, total, plain = cohort.play(opening, cohort.names[gone:], cohort.names[: count - gone])
    assert np.array_equal(total, plain)
    assert opener.liars == {}
    weights = {name: opening.weights[name] for name in cohort.names[gone:]}
    opened = opening.ring.mean(total, cohort.base, weights, opening.most)
    assert opened.scalars == pytest.approx(SCALARS, rel=1e-6)
