"""The live EAGLE drafter against the training rollout, which is the definition of what it must compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.drafting.eagle import EagleDrafter
from engine.drafting.eagle_head import EagleConfig, EagleHead
from engine.sampling import Sampling

VOCAB, HIDDEN = 61, 32


def small_head(seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    config = EagleConfig(
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        draft_vocab_size=40,
        target_vocab_size=VOCAB,
        feature_layers=(0, 1, 3),
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )
    head = EagleHead(config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    head.d2t.copy_(torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(VOCAB)[:40])))
    return head


def conversation(length: int, seed: int = 1) -> tuple[list[int], dict[int, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, length).tolist()
    features = {layer: rng.standard_normal((length, HIDDEN)).astype(np.float32) for layer in (0, 1, 3)}
    return tokens, features, rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)


def rollout_drafts(head, tokens, features, table, position, newest, depth) -> list[int]:
    """Greedy drafts after `newest` at `position`, by re-running the whole training rollout for each one."""
    known = [*tokens[:position], newest]
    drafts: list[int] = []
    for i in range(depth):
        ids = known + drafts + [0] * (depth + 1)
        padded = [
            torch.from_numpy(np.concatenate([features[x][:position], np.zeros((len(ids) - position, HIDDEN), "f4")]))[
                None
            ]
            for x in (0, 1, 3)
        ]
        states = list(head.rollout(padded, torch.from_numpy(table[ids])[None], i + 1))
        drafts.append(int(head.d2t[head.logits(states[i][0, position - 1]).argmax()]))
    return drafts


@pytest.mark.parametrize("splits", [[9], [1, 8], [3, 1, 1, 4], [1] * 9])
def test_live_drafts_equal_the_training_rollout(splits):
    head = small_head()
    tokens, features, table = conversation(9)
    drafter = EagleDrafter(head, lambda ids: table[list(ids)])
    at = 0
    for size in splits:
        drafter.extend(tokens[at : at + size], {k: v[at : at + size] for k, v in features.items()})
        at += size
    draft = drafter.propose(17, 4, Sampling())
    assert draft.distributions is None
    with torch.inference_mode():
        assert list(draft.ids) == rollout_drafts(head, tokens, features, table, 9, 17, 4)


def test_truncate_forgets_exactly_the_tail():
    head = small_head()
    tokens, features, table = conversation(12)
    drafter = EagleDrafter(head, lambda ids: table[list(ids)])
    drafter.extend(tokens, features)
    drafter.propose(3, 4, Sampling())  # leaves rows beyond the position that must not count
    drafter.truncate(5)
    other = {k: v[5:8] * -1 for k, v in features.items()}
    drafter.extend([1, 2, 3], other)
    joined = {k: np.concatenate([v[:5], other[k]]) for k, v in features.items()}
    fresh = EagleDrafter(head, lambda ids: table[list(ids)])
    fresh.extend([*tokens[:5], 1, 2, 3], joined)
    assert drafter.propose(9, 4, Sampling()).ids == fresh.propose(9, 4, Sampling()).ids
    assert drafter.position == 8
    with pytest.raises(ValueError, match="cannot truncate"):
        drafter.truncate(9)


def test_grows_past_its_first_capacity():
    head = small_head()
    tokens, features, table = conversation(700)
    whole = EagleDrafter(head, lambda ids: table[list(ids)])
    whole.extend(tokens, features)
    pieces = EagleDrafter(head, lambda ids: table[list(ids)])
    for at in range(0, 700, 7):
        pieces.extend(tokens[at : at + 7], {k: v[at : at + 7] for k, v in features.items()})
    assert whole.propose(5, 3, Sampling()).ids == pieces.propose(5, 3, Sampling()).ids


def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from():
    head = small_head()
    tokens, features, table = conversation(6)
    drafter = EagleDrafter(head, lambda ids: table[list(ids)])
    drafter.extend(tokens, features)
    sampling = Sampling(temperature=1.0, top_k=5, seed=4)
    draft = drafter.propose(2, 3, sampling)
    assert draft.distributions is not None
    assert draft.distributions.shape == (3, VOCAB)
    np.testing.assert_allclose(draft.distributions.sum(1), 1, atol=1e-9)
    outside = np.setdiff1d(np.arange(VOCAB), head.d2t.numpy())
    assert not draft.distributions[:, outside].any()
    assert all(row[token] > 0 for row, token in zip(draft.distributions, draft.ids, strict=True))
    assert drafter.propose(2, 3, sampling).ids == draft.ids  # the same seed and place: the same draft


def test_proposes_nothing_before_it_has_seen_a_token():
    head = small_head()
    drafter = EagleDrafter(head, lambda ids: np.zeros((len(ids), HIDDEN), np.float32))
    assert list(drafter.propose(1, 4, Sampling()).ids) == []
