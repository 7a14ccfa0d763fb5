"""What the default controller says of a plan, on numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from foretoken.controllers.explaining import as_report, in_words
from foretoken.controllers.plans import Option

NAMES = ["ngram", "model,k=4"]
PLAIN = Option(-1, 0, tokens=1.0, nodes=1.0, draft_s=0.0, seconds=2.0)
NGRAM = Option(0, 6, tokens=3.0, nodes=7.0, draft_s=0.0, seconds=2.5, share=0.5)
MODEL = Option(1, 2, tokens=1.6, nodes=3.0, draft_s=1.0, seconds=4.0)
RANKED = [NGRAM, PLAIN, MODEL]


def test_words_have_the_numbers_in_plain_rounds() -> None:
    told = in_words([NGRAM, MODEL], RANKED, NAMES)
    assert told == (
        "drafts: a round with 6 drafts of ngram costs 1.25 plain rounds and brings 3.00 tokens; where it has no guess, "
        "a round with 2 drafts of model,k=4 costs 2.00 plain rounds and brings 1.60 tokens"
    )
    assert in_words([], [PLAIN, MODEL], NAMES) == (
        "plain: a round with 2 drafts of model,k=4 costs 2.00 plain rounds and brings 1.60 tokens"
    )
    assert in_words([], [], NAMES) == "nothing is measured yet"
    assert in_words([], [PLAIN], NAMES) == "plain: nothing drafts"


def test_the_speedup_is_that_of_the_whole_text() -> None:
    """Half of the text at 2.5 s for three tokens, the other half plain at 2 s for one: 1.4167 s instead of 2."""
    told = as_report([NGRAM], RANKED, NAMES, 3)
    assert told["predicted_speedup"] == pytest.approx(2.0 / (0.5 * 2.5 / 3 + 0.5 * 2.0), abs=1e-3)
    assert told["plan"] == ["ngram"] and told["batch"] == 3
    assert told["options"][0] == {"drafter": "ngram", "depth": 6, "tokens": 3.0, "cost": 1.25, "share": 0.5}
    assert [one["drafter"] for one in told["options"]] == NAMES
    assert as_report([], RANKED, NAMES, 1)["predicted_speedup"] == 1.0
    assert as_report([], [], NAMES, 0)["predicted_speedup"] is None
