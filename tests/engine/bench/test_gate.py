from __future__ import annotations

from engine.bench.gate import NEAR_TIE, Reference, check

REFERENCE = Reference(ids=(5, 6, 7, 8), margins=(3.0, 2.0, 0.1, 4.0), runners_up=(1, 2, 3, 4))


def test_the_same_tokens_pass() -> None:
    gate = check([5, 6, 7, 8], REFERENCE)
    assert gate.passed
    assert str(gate) == "all 4 tokens of the reference"


def test_the_runner_up_of_a_near_tie_passes_and_what_follows_is_not_looked_at() -> None:
    gate = check([5, 6, 3, 99], REFERENCE)
    assert (gate.passed, gate.agreed, gate.tie) == (True, 2, 0.1)
    assert str(gate) == "2 of 4 tokens, then a near tie (0.10 logits)"


def test_a_third_token_at_a_near_tie_is_wrong() -> None:
    gate = check([5, 6, 9, 8], REFERENCE)
    assert not gate.passed
    assert str(gate) == "wrong token after 2 of 4: neither of the two likeliest, 0.10 logits from the first"


def test_the_runner_up_of_a_clear_winner_is_wrong() -> None:
    assert REFERENCE.margins[1] > NEAR_TIE
    assert "the runner-up, 2.00 logits" in str(check([5, 2, 7, 8], REFERENCE))


def test_too_few_tokens_are_wrong() -> None:
    assert str(check([5, 6], REFERENCE)) == "2 tokens where 4 were asked for"
