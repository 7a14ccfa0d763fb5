"""What drafters know of a request."""

from __future__ import annotations

import pytest

from foretoken.core import Context, Rng
from foretoken.core.sampling import Sampler, SamplingParams


def test_the_samplers_old_name_works_and_says_so() -> None:
    context = Context(0, [1, 2], 2, Sampler(SamplingParams(), 0), Rng(0))
    with pytest.warns(DeprecationWarning, match=r"context\.sampler"):
        assert context.maker is context.sampler
