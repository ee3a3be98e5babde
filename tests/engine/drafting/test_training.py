"""Harvest, train, save, load, draft: the whole road on a small random model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.backends.torch_reference import TorchReference
from engine.drafting.batched_target import BatchedTarget, StaticCache
from engine.drafting.checkpoint import load_drafter, save_drafter, target_fingerprint
from engine.drafting.eagle import EagleDrafter
from engine.drafting.evaluate import summarise, true_context
from engine.drafting.harvest import Harvester, HarvestOptions, TurnTokens, harvest
from engine.drafting.train import TrainOptions, batches, draft_vocabulary, looping, read_shards, train
from engine.errors import DrafterError, UsageError
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from tests.synthetic import small_config, write_random_packed

TURNS = TurnTokens(start=(1, 50, 51), user_to_reply=(60, 1, 61), reply_to_user=(62, 1, 50), end_of_turn=2)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These tensors are too small to share: threads that wait for each other take twenty times as long on a busy
    machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> PackedModel:
    directory = tmp_path_factory.mktemp("drafting") / "model"
    return PackedModel.open(
        write_random_packed(directory, small_config("mistral", num_layers=4, logits_scaling=0.1), bits=8)
    )


@pytest.fixture(scope="module")
def target(model) -> BatchedTarget:
    return BatchedTarget(model)


@pytest.fixture(scope="module")
def shards(target, tmp_path_factory):
    options = HarvestOptions(
        tokens=32 * 40 * 2, length=40, batch=32, top_k=8, longest_user_turn=6, greedy_share=1.0, seed=3
    )
    directory = tmp_path_factory.mktemp("harvest")
    harvest(Harvester(target, TURNS, [[70], [71, 72]], options), directory)
    return read_shards(directory)


@pytest.mark.parametrize("family", ["granite", "llama", "mistral", "qwen3"])
def test_the_batched_target_is_the_reference(family, tmp_path):
    packed = PackedModel.open(write_random_packed(tmp_path / "m", small_config(family), bits=8))
    batched = BatchedTarget(packed)
    ids = np.random.default_rng(0).integers(3, packed.config.vocab_size, (3, 9))
    with torch.inference_mode():
        hidden, features = batched.forward(torch.from_numpy(ids), (0, 1, 2))
        logits = batched.logits(hidden).numpy()
        cache = StaticCache(packed.config, 3, 9, batched.device, batched.dtype)
        stepped = [
            batched.logits(batched.decode(torch.from_numpy(ids[:, t]), torch.tensor([t]), cache)).numpy()
            for t in range(9)
        ]
    np.testing.assert_allclose(np.stack(stepped, 1), logits, atol=2e-5 * np.abs(logits).max())
    for row in range(3):
        reference = TorchReference.from_packed(packed)
        out = reference.step(ids[row].tolist(), features=(0, 1, 2))
        np.testing.assert_allclose(logits[row], out.logits, atol=2e-5 * np.abs(out.logits).max())
        for layer, feature in enumerate(features):
            np.testing.assert_allclose(feature[row].numpy(), out.features[layer], atol=1e-4)


def test_harvest_follows_the_template_and_the_target(target, shards):
    with np.load(shards[0]) as data:
        tokens, replies = data["tokens"].astype(np.int64), data["replies"]
    assert tokens.shape == replies.shape == (32, 40)
    assert (tokens[:, :3] == TURNS.start).all()
    assert set(tokens[:, 3]) <= {70, 71}
    assert replies.any(1).all()
    for row, mask in zip(tokens, replies, strict=True):
        first = int(np.flatnonzero(mask)[0])
        assert tuple(row[first - 3 : first]) == TURNS.user_to_reply
        assert row[first - 4] == TURNS.end_of_turn
    with torch.inference_mode():
        hidden, _ = target.forward(torch.from_numpy(tokens))
        best = target.logits(hidden).argmax(-1).numpy()
    greedy = replies[:, 1:]
    assert (best[:, :-1] == tokens[:, 1:])[greedy].mean() > 0.99  # greedy_share = 1; batched rounding may flip a tie


def test_harvest_resumes_and_repeats_itself(target, shards, tmp_path):
    options = HarvestOptions(
        tokens=32 * 40 * 2, length=40, batch=32, top_k=8, longest_user_turn=6, greedy_share=1.0, seed=3
    )
    harvester = Harvester(target, TURNS, [[70], [71, 72]], options)
    harvest(harvester, tmp_path)
    (tmp_path / "shard-00001.npz").unlink()
    harvest(harvester, tmp_path)
    for old, new in zip(shards, read_shards(tmp_path), strict=True):
        with np.load(old) as a, np.load(new) as b:
            assert (a["tokens"] == b["tokens"]).all()


def test_templates_are_cut_into_turns():
    def render(messages, prompt):  # a chatml in miniature: 1 opens a turn, 2 ends it, 9 is a line break
        ids = [7]
        for message in messages:
            ids += [1, 50 if message["role"] == "user" else 61, 9, 2, 9]
        return ids + ([1, 61, 9] if prompt else [])

    turns = TurnTokens.from_template(render, 2)
    assert turns == TurnTokens((7, 1, 50, 9), (9, 1, 61, 9), (9, 1, 50, 9), 2)
    with pytest.raises(UsageError, match="cannot be cut"):
        TurnTokens.from_template(lambda messages, prompt: [5, 5], 2)


def test_training_learns_and_the_drafter_file_keeps_it(model, target, shards, tmp_path):
    options = TrainOptions(draft_vocab=256, depth=3, batch=8, epochs=6, learning_rate=4e-3)
    reports = []
    head = train(target, shards, options, tmp_path / "t", reports.append, report_every=8)
    assert reports[-1].loss < reports[0].loss
    assert reports[-1].accuracy[0] > 2 * reports[0].accuracy[0]
    with np.load(shards[0]) as data:
        tokens, replies = data["tokens"][:16], data["replies"][:16]
    trained = summarise(true_context(head, target, tokens, replies, 3))
    blank = summarise(
        true_context(
            train(target, shards, replace(options, max_seconds=1e-6), tmp_path / "u"), target, tokens, replies, 3
        )
    )
    assert trained.length > blank.length + 0.1
    save_drafter(tmp_path / "drafter.safetensors", head, target_fingerprint(model))
    loaded = load_drafter(tmp_path / "drafter.safetensors", model)
    assert loaded.config == head.config
    again = summarise(true_context(loaded, target, tokens, replies, 3))
    assert again.length == pytest.approx(trained.length, abs=0.15)  # int8 weights


def test_true_context_and_live_agree(model, target, shards):
    """The same reply, scored in one pass over the finished text and by drafting and verifying step by step."""
    head = train(
        target,
        shards,
        TrainOptions(draft_vocab=256, depth=3, batch=8, epochs=4, learning_rate=3e-3),
        shards[0].parent / "none",
    )
    with np.load(shards[0]) as data:
        tokens, replies = data["tokens"][0], data["replies"][0]
    first = int(np.flatnonzero(replies)[0])
    end = first + int(np.argmin(replies[first:])) if not replies[first:].all() else len(tokens)
    mask = np.zeros_like(replies)
    mask[first:end] = True
    (offline,) = true_context(head, target, tokens[None], mask[None], 3)
    text = tokens.astype(np.int64).tolist()
    reference = TorchReference.from_packed(model)
    drafter = EagleDrafter.of(head, model)
    features = reference.step(text[:first], features=head.config.feature_layers).features
    drafter.extend(text[:first], features)
    steps, accepted, newest = 0, 0, first
    while newest < end - 1:
        draft = list(drafter.propose(text[newest], 3, Sampling()).ids)[: end - 1 - newest]
        taken = 0
        while taken < len(draft) and draft[taken] == text[newest + 1 + taken]:
            taken += 1
        fed = text[newest : newest + taken + 1]
        drafter.extend(fed, reference.step(fed, features=head.config.feature_layers).features)
        steps, accepted, newest = steps + 1, accepted + taken, newest + taken + 1
    assert (offline.steps, sum(offline.accepted)) == (steps, accepted)


def test_training_resumes_where_it_stopped(target, shards, tmp_path):
    options = TrainOptions(draft_vocab=128, depth=2, batch=8, epochs=1)
    whole = train(target, shards, options, tmp_path / "a")

    class Stopped(Exception):
        pass

    def stop(report):
        if report.step >= 5:
            raise Stopped

    with pytest.raises(Stopped):
        train(target, shards, options, tmp_path / "b", stop, report_every=1, save_every=3)
    resumed = train(target, shards, options, tmp_path / "b")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    with pytest.raises(UsageError, match="other options"):
        train(target, shards, replace(options, depth=3), tmp_path / "b")


def test_the_draft_vocabulary_is_what_replies_use(shards):
    counts = np.zeros(320, np.int64)
    for shard in shards:
        with np.load(shard) as data:
            counts += np.bincount(data["tokens"][data["replies"]], minlength=320)
    chosen = draft_vocabulary(shards, 10, 320)
    assert (np.diff(chosen) > 0).all()
    assert counts[chosen].min() >= np.delete(counts, chosen).max()


def test_what_loops_is_found_and_left_out(tmp_path):
    rng = np.random.default_rng(0)
    plain = rng.integers(0, 1000, 60)
    loop = np.concatenate([plain[:20], np.tile(plain[20:25], 8)])  # 5 tokens, eight times
    tokens = np.stack([plain, loop]).astype(np.uint32)
    found = looping(tokens, window=16)
    assert not found[0].any()
    assert np.flatnonzero(found[1]).tolist() == [*range(20 + 16 + 5 - 1, 60)]  # from the first window seen 5 tokens ago
    assert not looping(tokens[:, :16], window=16).any()
    np.savez(tmp_path / "shard-00000.npz", tokens=tokens, replies=np.ones(tokens.shape, bool))
    ((_, kept),) = batches(read_shards(tmp_path), 2, seed=0, skip_loops=True)
    assert sorted(kept.sum(1).tolist()) == [40, 60]


def test_a_drafter_of_another_model_is_refused(model, target, shards, tmp_path):
    head = train(target, shards, TrainOptions(draft_vocab=64, depth=1, batch=8, max_seconds=1e-6), tmp_path / "t")
    path = tmp_path / "drafter.safetensors"
    save_drafter(path, head, target_fingerprint(model))
    other = PackedModel.open(write_random_packed(tmp_path / "m", small_config("mistral", num_layers=4), seed=9))
    with pytest.raises(DrafterError, match="another model"):
        load_drafter(path, other)
    smaller = PackedModel.open(write_random_packed(tmp_path / "s", small_config("llama", hidden_size=96)))
    with pytest.raises(DrafterError, match="another model"):
        load_drafter(path, smaller)


def test_corrupt_drafters_give_one_line(model, target, shards, tmp_path):
    head = train(target, shards, TrainOptions(draft_vocab=64, depth=1, batch=8, max_seconds=1e-6), tmp_path / "t")
    good = tmp_path / "drafter.safetensors"
    save_drafter(good, head, target_fingerprint(model))
    data = good.read_bytes()
    rng = np.random.default_rng(0)
    bad = tmp_path / "bad.safetensors"
    for trial in range(150):
        mutated = bytearray(data)
        if trial % 3 == 0:
            mutated = mutated[: int(rng.integers(0, len(data)))]
        else:
            for _ in range(int(rng.integers(1, 5))):
                mutated[int(rng.integers(0, 3000 if trial % 3 == 1 else len(data)))] ^= 1 << int(rng.integers(8))
        bad.write_bytes(bytes(mutated))
        with suppress(DrafterError):  # anything else fails the test; some flips only change a weight
            load_drafter(bad, model)
    with pytest.raises(DrafterError, match="no drafter"):
        load_drafter(tmp_path / "absent.safetensors", model)
