"""Harvest, train, save, load, draft: the whole road on a small random model."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from engine.backends.torch_reference import TorchReference
from engine.drafting import checkpoint
from engine.drafting.batched_target import BatchedTarget, StaticCache
from engine.drafting.checkpoint import load_drafter, save_drafter, target_fingerprint
from engine.drafting.corpus import Corpus, looping, read_shards
from engine.drafting.eagle import EagleDrafter
from engine.drafting.eagle_head import EagleConfig, EagleHead
from engine.drafting.evaluate import summarise, true_context
from engine.drafting.harvest import Conversations, Harvester, HarvestOptions, OpeningTokens, TurnTokens, harvest
from engine.drafting.train import Trainer, TrainOptions, eagle_config, start_from_target, train
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


OPTIONS = HarvestOptions(
    tokens=32 * 80, length=40, steps=80, batch=32, longest_user_turn=6, longest_reply=24, greedy_share=1.0, seed=3
)


def openings(count, rng):
    return [OpeningTokens([70, int(rng.integers(80, 200))], bool(rng.random() < 0.7)) for _ in range(count)]


@pytest.fixture(scope="module")
def shards(target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("harvest")
    harvest(Harvester(target, TURNS, OPTIONS), directory, openings)
    return read_shards(directory)


def rows_of(shard, length=40) -> tuple[np.ndarray, np.ndarray]:
    """The whole conversations of a shard, padded: tokens uint32 and replies bool [n, length]."""
    written = Conversations.load(shard)
    spans = list(zip(written.starts[:-1], written.starts[1:], strict=True))
    tokens, replies = np.zeros((len(spans), length), np.uint32), np.zeros((len(spans), length), bool)
    for row, (begin, end) in enumerate(spans):
        tokens[row, : end - begin], replies[row, : end - begin] = written.tokens[begin:end], written.replies[begin:end]
    return tokens, replies


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
            batched.logits(batched.decode(torch.from_numpy(ids[:, t]), torch.full((3,), t), cache)).numpy()
            for t in range(9)
        ]
    np.testing.assert_allclose(np.stack(stepped, 1), logits, atol=2e-5 * np.abs(logits).max())
    for row in range(3):
        reference = TorchReference.from_packed(packed)
        out = reference.step(ids[row].tolist(), features=(0, 1, 2))
        np.testing.assert_allclose(logits[row], out.logits, atol=2e-5 * np.abs(out.logits).max())
        for layer, feature in enumerate(features):
            np.testing.assert_allclose(feature[row].numpy(), out.features[layer], atol=1e-4)


def test_rows_at_positions_of_their_own(model):
    """A row that begins anew in a used cache sees nothing of what stood there."""
    batched = BatchedTarget(model)
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, model.config.vocab_size, (2, 7)))
    cache = StaticCache(model.config, 2, 9, batched.device, batched.dtype)
    with torch.inference_mode():
        want = batched.logits(batched.forward(ids)[0])
        for t in range(7):  # the second row starts over after three tokens
            fed = torch.stack((ids[0, t], ids[1, t if t < 3 else t - 3]))
            out = batched.decode(fed, torch.tensor([t, t if t < 3 else t - 3]), cache)
            got = batched.logits(out)
            scale = float(want.abs().max())
            torch.testing.assert_close(got[0], want[0, t], atol=2e-5 * scale, rtol=0)
            torch.testing.assert_close(got[1], want[1, t if t < 3 else t - 3], atol=2e-5 * scale, rtol=0)


def test_harvest_follows_the_template_and_the_target(target, shards):
    written = Conversations.load(shards[0])
    assert len(written.tokens) == len(written.replies) == 32 * 80
    assert written.starts[0] == 0
    assert written.starts[-1] == 32 * 80
    lengths = np.diff(written.starts)
    assert lengths.max() <= 40
    assert len(lengths) > 64
    complete = 0
    for begin, end in zip(written.starts[:-1], written.starts[1:], strict=True):
        text, mask = written.tokens[begin:end].tolist(), written.replies[begin:end]
        assert tuple(text[:3]) == TURNS.start[: len(text)]
        assert text[3:4] in ([], [70])
        if not mask.any():
            continue  # cut where the batch ends
        first = int(np.flatnonzero(mask)[0])
        assert tuple(text[first - 3 : first]) == TURNS.user_to_reply
        assert text[first - 4] == TURNS.end_of_turn
        complete += first == 3 + 2 + 1 + 3
        assert mask.sum() <= 2 * 24
    assert complete > 20
    tokens, replies = rows_of(shards[0])
    with torch.inference_mode():
        hidden, _ = target.forward(torch.from_numpy(tokens.astype(np.int64)))
        best = target.logits(hidden).argmax(-1).numpy()
    agrees = (best[:, :-1] == tokens[:, 1:])[replies[:, 1:]]
    assert agrees.size > 500
    assert agrees.mean() > 0.99


def test_sampling_stays_within_min_p_and_follows_the_temperature(target):
    harvester = Harvester(target, TURNS, replace(OPTIONS, min_p=0.1))
    logits = torch.tensor([0.0, -1.0, -2.0, -3.0]).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    drawn = harvester._choose(logits, torch.full((4000,), 0.8), generator)
    weights = torch.tensor([0.0, -1.0, -2.0, -3.0]).div(0.8).exp()
    weights[weights < 0.1] = 0  # keeps 1, 0.29; exp(-2.5) = 0.08 falls out
    share = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(share, weights / weights.sum(), atol=0.03, rtol=0)
    assert not harvester._choose(logits, torch.zeros(4000), generator).any()


def test_harvest_resumes_and_repeats_itself(target, shards, tmp_path):
    harvester = Harvester(target, TURNS, OPTIONS)
    harvest(harvester, tmp_path, openings)
    again = read_shards(tmp_path)
    assert len(again) == len(shards) == 1
    assert (Conversations.load(again[0]).tokens == Conversations.load(shards[0]).tokens).all()
    again[0].write_bytes(b"kept as it is")
    harvest(harvester, tmp_path, openings)
    assert again[0].read_bytes() == b"kept as it is"


def test_a_reply_that_only_repeats_itself_ends(target):
    """A target that always says the same token: its replies end after the tokens that tell a loop."""

    class Monotone(BatchedTarget):
        def logits(self, hidden):
            return torch.nn.functional.one_hot(torch.full(hidden.shape[:-1], 99), self.config.vocab_size).float()

    options = replace(OPTIONS, length=100, steps=100, batch=2, longest_reply=90)
    stuck = Monotone.__new__(Monotone)
    stuck.__dict__ = target.__dict__
    written = Harvester(stuck, TURNS, options).converse([OpeningTokens([70], True)] * 4, 0)
    spoken = [int(written.replies[a:b].sum()) for a, b in zip(written.starts[:-1], written.starts[1:], strict=True)]
    assert spoken[0] == 33  # one token, and 32 that repeat it


def test_questions_of_an_evaluation_are_not_learned_from(target):
    harvester = Harvester(target, TURNS, OPTIONS)
    written = harvester.converse([OpeningTokens([70, 71], True), OpeningTokens([70, 72], True)], 0)
    written.unlearn(TURNS, {(70, 72)})
    for begin, end in zip(written.starts[:-1], written.starts[1:], strict=True):
        if end - begin > 12:
            assert written.replies[begin:end].any() == (written.tokens[begin + 4] == 71)


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


@pytest.mark.parametrize("options", [{}, {"reached_only": True}, {"label_temperature": 0.0}])
def test_a_batch_s_loss_is_what_its_definition_says(target, shards, options):
    """Against loops over every row, index and draft position."""
    options = TrainOptions(draft_vocab=200, depth=3, decay=0.7, **{"label_temperature": 0.5, **options})
    corpus = Corpus(shards, torch.device("cpu"))
    head = EagleHead(eagle_config(target.config, 200))
    head.d2t.copy_(torch.from_numpy(corpus.frequent_tokens(200, target.config.vocab_size)))
    start_from_target(head, target)
    tokens, learn = next(corpus.batches(256, seed=0))
    loss, correct, tested = Trainer(target, head, options).losses(tokens, learn)
    with torch.no_grad():
        hidden, features = target.forward(tokens, head.config.feature_layers)
        logits = target.logits(hidden)
        states = list(head.rollout(features, target.embed(tokens), 3))
    vocabulary = head.d2t.tolist()
    head.requires_grad_(False)
    want, hits, trials = 0.0, [0, 0, 0], [0, 0, 0]
    for i, state in enumerate(states):
        terms = []
        for row in range(tokens.shape[0]):
            for t in range(tokens.shape[1] - 2 - i):
                if not learn[row, t + 2 + i]:
                    continue
                drafts = [vocabulary[int(head.logits(states[j][row, t]).argmax())] for j in range(i + 1)]
                reached = drafts[:i] == tokens[row, t + 2 : t + 2 + i].tolist()
                best = int(logits[row, t + 1 + i].argmax())
                trials[i] += reached
                hits[i] += reached and drafts[i] == best
                if best not in vocabulary or (options.reached_only and not reached):
                    continue
                drafted = head.logits(state[row, t]).log_softmax(-1)
                if options.label_temperature == 0:
                    terms.append(-float(drafted[vocabulary.index(best)]))
                else:
                    wanted = (logits[row, t + 1 + i, head.d2t] / options.label_temperature).softmax(-1)
                    terms.append(-float((wanted * drafted).sum()))
        want += 0.7**i * (sum(terms) / max(1, len(terms)))
    assert trials[0] > 30
    assert correct.tolist() == hits
    assert tested.tolist() == trials
    assert loss.item() == pytest.approx(want, rel=1e-4)


def test_training_learns_and_the_drafter_file_keeps_it(model, target, shards, tmp_path):
    options = TrainOptions(draft_vocab=256, depth=3, batch_tokens=512, epochs=8, learning_rate=4e-3, warmup=5)
    reports = []
    head = train(target, shards, options, tmp_path / "t", reports.append, report_every=8)
    assert reports[-1].loss < reports[0].loss
    assert reports[-1].accuracy[0] > 2 * reports[0].accuracy[0]
    tokens, replies = (rows[:24] for rows in rows_of(shards[0]))
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
        TrainOptions(draft_vocab=256, depth=3, batch_tokens=512, epochs=4, learning_rate=3e-3),
        shards[0].parent / "none",
    )
    rows, masks = rows_of(shards[0])
    longest = int(masks.sum(1).argmax())
    tokens, replies = rows[longest], masks[longest]
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
    options = TrainOptions(draft_vocab=128, depth=2, batch_tokens=256, epochs=1)
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
    written = Conversations.load(shards[0])
    counts = np.bincount(written.tokens[written.replies], minlength=320)
    chosen = Corpus(shards, torch.device("cpu")).frequent_tokens(10, 320)
    assert (np.diff(chosen) > 0).all()
    assert counts[chosen].min() >= np.delete(counts, chosen).max()


def test_what_loops_is_found_and_copies_are_not():
    rng = np.random.default_rng(0)
    plain = rng.integers(0, 1000, 60)
    loop = np.concatenate([plain[:20], np.tile(plain[20:25], 8)])  # 5 tokens, eight times
    copy = np.concatenate([plain[:30], plain[:30]])  # of the user's words
    tokens = torch.from_numpy(np.concatenate([plain, loop, copy]))
    conversations = torch.arange(3).repeat_interleave(60)
    replies = torch.ones(180, dtype=torch.bool)
    replies[120:150] = False
    found = looping(tokens, replies, conversations, window=16)
    # From the first window seen 5 tokens ago; conversation 0's words in conversations 1 and 2 do not count.
    assert np.flatnonzero(found).tolist() == [*range(60 + 20 + 16 + 5 - 1, 120)]
    assert not looping(tokens[:12], replies[:12], conversations[:12], window=16).any()


def test_batches_hold_no_conversation_twice_and_pad_at_the_end(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 200, 50)
    starts = np.append(0, np.cumsum(lengths))
    tokens = (np.repeat(np.arange(50), lengths) + 1).astype(np.uint32)
    replies = np.ones(len(tokens), bool)
    replies[starts[3] : starts[4]] = False  # nothing to learn from it
    Conversations(tokens, replies, starts).save(tmp_path / "shard-00000.npz")
    corpus = Corpus(read_shards(tmp_path), torch.device("cpu"), skip_loops=False)
    seen = []
    for ids, learn in corpus.batches(512, seed=1):
        assert ids.shape == learn.shape
        assert ids.shape[1] % 64 == 0
        assert ids.numel() <= 512
        for row, mask in zip(ids, learn, strict=True):
            count = int(mask.sum())
            assert mask[:count].all()
            assert not row[count:].any()
            assert count == lengths[int(row[0]) - 1]
            assert (row[:count] == row[0]).all()
            seen.append(int(row[0]) - 1)
    assert len(set(seen)) == len(seen) >= 48 - 2
    assert 3 not in seen
    small, _ = next(corpus.batches(1 << 20, seed=1))  # unless it is all there is
    assert small.shape == (49, 256)
    assert corpus.plan(512, 1)[0][0].tolist() != corpus.plan(512, 2)[0][0].tolist()


def test_a_drafter_of_another_model_is_refused(model, target, shards, tmp_path):
    head = train(target, shards, TrainOptions(draft_vocab=64, depth=1, max_seconds=1e-6), tmp_path / "t")
    path = tmp_path / "drafter.safetensors"
    save_drafter(path, head, target_fingerprint(model))
    other = PackedModel.open(write_random_packed(tmp_path / "m", small_config("mistral", num_layers=4), seed=9))
    with pytest.raises(DrafterError, match="another model"):
        load_drafter(path, other)
    smaller = PackedModel.open(write_random_packed(tmp_path / "s", small_config("llama", hidden_size=96)))
    with pytest.raises(DrafterError, match="another model"):
        load_drafter(path, smaller)


def test_corrupt_drafters_give_one_line(model, target, shards, tmp_path):
    head = train(target, shards, TrainOptions(draft_vocab=64, depth=1, max_seconds=1e-6), tmp_path / "t")
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_heads", "x"),
        ("hidden_size", True),
        ("num_kv_heads", 3.0),
        ("head_dim", 1 << 21),
        ("feature_layers", []),
        ("rope_theta", "x"),
        ("rope_theta", 0.0),
        ("rms_norm_eps", float("nan")),
    ],
)
def test_a_drafter_s_config_holds_what_a_head_can_have(model, tmp_path, key, value):
    path = tmp_path / "drafter.safetensors"
    dims = dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "target_vocab_size"), 32)
    head = EagleHead(
        EagleConfig(32, draft_vocab_size=32, feature_layers=(1,), rms_norm_eps=1e-5, rope_theta=1e4, **dims)
    )
    save_drafter(path, head, target_fingerprint(model))
    with safe_open(path, framework="np") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata["config"] = json.dumps(json.loads(metadata["config"]) | {key: value})
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(DrafterError, match=r"drafter.safetensors is a malformed drafter \("):
        load_drafter(path, model)


def test_a_drafter_that_may_not_be_read_is_not_called_absent(model, tmp_path, monkeypatch):
    path = tmp_path / "drafter.safetensors"
    path.touch(mode=0)

    def refused(*arguments, **named):  # as safetensors answers EACCES; root would be let in
        raise FileNotFoundError("No such file or directory")

    monkeypatch.setattr(checkpoint, "safe_open", refused)
    with pytest.raises(DrafterError, match=r"drafter.safetensors cannot be read"):
        load_drafter(path, model)


def test_training_goes_on_from_a_drafter(model, target, shards, tmp_path):
    options = TrainOptions(draft_vocab=64, depth=2, batch_tokens=512, epochs=6, learning_rate=4e-3, warmup=5)
    head = train(target, shards, options, tmp_path / "a")
    path = tmp_path / "drafter.safetensors"
    save_drafter(path, head, target_fingerprint(model))
    start = load_drafter(path, model)
    as_it_was = {name: value.clone() for name, value in start.state_dict().items()}
    reports = []
    short = replace(options, epochs=1, draft_vocab=96)
    further = train(target, shards, short, tmp_path / "b", reports.append, report_every=1, start=start)
    afresh = []
    train(target, shards, short, tmp_path / "c", afresh.append, report_every=1)
    assert reports[0].accuracy[0] > 1.3 * afresh[0].accuracy[0]  # before it has learned anything here
    assert all(torch.equal(value, as_it_was[name]) for name, value in start.state_dict().items())
    assert not torch.equal(further.q.weight, start.q.weight)
    # The vocabulary grew by the lowest ids that it lacked.
    known = set(start.d2t.tolist())
    assert further.d2t.tolist() == [*start.d2t.tolist(), *[i for i in range(320) if i not in known][:32]]
    for other in (replace(options, draft_vocab=32), replace(options, intermediate_size=32)):
        with pytest.raises(UsageError, match=r"draft_vocab_size 64, not 32|intermediate_size \d+, not 32"):
            train(target, shards, other, tmp_path / "d", start=start)


def test_a_widened_head_starts_with_the_target_s_rows(target, shards, tmp_path):
    head = train(target, shards, TrainOptions(draft_vocab=64, max_seconds=1e-6), tmp_path / "a")
    wider = train(target, shards, TrainOptions(draft_vocab=80, learning_rate=0.0), tmp_path / "b", start=head)
    torch.testing.assert_close(wider.head.weight[:64], head.head.weight, rtol=0, atol=0)
    torch.testing.assert_close(wider.head.weight[64:], target.head[wider.d2t[64:]], rtol=0, atol=0)


def test_a_head_of_four_bits(model, target, shards, tmp_path):
    head = train(target, shards, TrainOptions(draft_vocab=128, max_seconds=1e-6), tmp_path / "t")
    full, small = tmp_path / "8.safetensors", tmp_path / "4.safetensors"
    save_drafter(full, head, target_fingerprint(model))
    save_drafter(small, head, target_fingerprint(model), head_bits=4)
    hidden = head.config.hidden_size
    # int8: a byte a weight and 2 a group of 32; int4: half a byte, and 4 a group.
    saved = 128 * (hidden * (1 - 0.5) - hidden / 32 * (4 - 2))
    assert full.stat().st_size - small.stat().st_size == pytest.approx(saved, abs=200)
    loaded = load_drafter(small, model)
    groups = head.head.weight.detach().unflatten(-1, (-1, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = loaded.head.weight.unflatten(-1, (-1, 32)) - groups
    # Rounding evenly to a step errs by 0.29 of it.
    assert (error.square().mean(-1).sqrt() <= 0.4 * step).all()
    torch.testing.assert_close(loaded.q.weight, load_drafter(full, model).q.weight, rtol=0, atol=0)
