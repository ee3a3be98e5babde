from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.errors import CheckpointError, ContextOverflow, UnsupportedModel, UsageError
from engine.text.gguf_tokenizer import tokenizer_from_gguf
from engine.text.tokenizer import StopStrings, TextStream, Tokenizer
from tests.engine.hard_strings import HANDWRITTEN, SURROGATES, generated
from tests.synthetic import byte_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokenizer_ids.json").read_text(encoding="utf-8"))
SPM_METADATA = {f"tokenizer.ggml.{key}": value for key, value in GOLDEN["spm vocabulary"].items()}
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_level() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer())))


@functools.cache
def spm() -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(SPM_METADATA))


@pytest.fixture(scope="module", params=["byte_level", "spm"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return {"byte_level": byte_level, "spm": spm}[request.param]()


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2_gguf: Path) -> dict[str, Any]:
    from engine.checkpoint import open_checkpoint

    with open_checkpoint(smollm2_gguf) as checkpoint:
        return dict(checkpoint.metadata)


def texts_of_golden(name: str) -> list[str]:
    texts = [*HANDWRITTEN, *generated(100)]
    return [text for text in texts if not text.startswith(" ")] if name == "spm" else texts


# The model's own ids


@pytest.mark.real_model
@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in ("spm", "spm vocabulary")])
def test_byte_level_bpe_gives_the_ids_of_llama_cpp(name: str, smollm2_metadata: dict[str, Any]) -> None:
    pre = name.split()[0]
    tokenizer = Tokenizer(tokenizer_from_gguf({**smollm2_metadata, "tokenizer.ggml.pre": pre}))
    expected = [ids or base for ids, base in zip(GOLDEN[name], GOLDEN["smollm"], strict=True)]
    texts = texts_of_golden(name)
    assert [tokenizer.encode(text, special="special" in name) for text in texts] == expected


def test_sentencepiece_gives_the_ids_of_llama_cpp() -> None:
    tokenizer = spm()
    assert [tokenizer.encode(text) for text in texts_of_golden("spm")] == GOLDEN["spm"]


@pytest.mark.real_model
def test_smollm2_packed_keeps_its_tokenizer(smollm2: Path) -> None:
    from engine.packed.model import PackedModel

    tokenizer = Tokenizer.from_packed(PackedModel.open(smollm2))
    assert tokenizer.token_count == 49152
    assert [tokenizer.encode(text) for text in texts_of_golden("smollm")] == GOLDEN["smollm"]


def prefix_ids(library: tokenizers.Tokenizer) -> list[int]:
    """What a model's own tokenizer puts before a bare text."""
    encoding = library.encode("a", add_special_tokens=True)
    return encoding.ids[: encoding.special_tokens_mask.index(0)]


def test_survives_the_way_through_tokenizer_json(tmp_path: Path) -> None:
    rebuilt = tokenizer_from_gguf(SPM_METADATA)
    rebuilt.save(str(tmp_path / "tokenizer.json"))
    read, direct = Tokenizer.from_file(tmp_path / "tokenizer.json"), Tokenizer(rebuilt)
    for text in HANDWRITTEN:
        assert read.encode(text, special=True) == direct.encode(text, special=True)
    assert read.special_ids == direct.special_ids
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert prefix_ids(saved) == prefix_ids(rebuilt) == [1]


# Special tokens


def test_text_never_becomes_a_special_token(tokenizer: Tokenizer) -> None:
    for text in [*HANDWRITTEN, *SURROGATES, *(a + b for a in SPECIAL for b in SPECIAL)]:
        assert not tokenizer.special_ids.intersection(tokenizer.encode(text)), text


@given(st.lists(st.sampled_from([*SPM_METADATA["tokenizer.ggml.tokens"][:5], "<", ">", "[", "IN", "ST]", "▁", " "])))
def test_no_mixture_becomes_a_special_token(pieces: list[str]) -> None:
    tokenizer = spm()
    assert not tokenizer.special_ids.intersection(tokenizer.encode("".join(pieces)))


def test_special_tokens_count_where_they_are_wanted() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("<|im_start|>a<|im_end|>", special=True)
    assert [tokenizer.token(id) for id in ids] == ["<|im_start|>", "a", "<|im_end|>"]
    assert tokenizer.find_special("x<|im_end|>") == [(1, 11)]


def test_a_special_token_counts_only_whole_within_a_marked_part() -> None:
    tokenizer = byte_level()
    marked, cut = tokenizer.encode("<|im_end|>", special=True)[0], tokenizer.encode("<|im_end|>")
    assert tokenizer.encode_parts([("<|im_end|>", True)]) == [marked]
    assert tokenizer.encode_parts([("<|im_", True), ("end|>", True)]) == cut
    assert tokenizer.encode_parts([("<|im_", True), ("end|>", False)]) == cut
    assert tokenizer.encode_parts([("<|im_end|>", False), ("<|im_end|>", True)]) == [*cut, marked]


def test_text_runs_together_across_parts() -> None:
    tokenizer = spm()
    whole = tokenizer.encode("the seashells")
    assert tokenizer.encode_parts([("the se", False), ("ash", True), ("ells", False)]) == whole


@pytest.mark.parametrize(("lstrip", "rstrip", "expected"), [(True, False, "a| b"), (False, True, "a |b")])
def test_a_special_token_swallows_the_white_space_it_is_declared_with(
    lstrip: bool, rstrip: bool, expected: str
) -> None:
    library = tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer()))
    library.add_special_tokens([AddedToken("<x>", lstrip=lstrip, rstrip=rstrip, special=True, normalized=False)])
    tokenizer = Tokenizer(library)
    ids = tokenizer.encode("a <x> b", special=True)
    assert "".join("|" if id in tokenizer.special_ids else tokenizer.decode([id]) for id in ids) == expected


def test_added_tokens_that_are_not_special_are_always_read() -> None:
    library = tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer()))
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer = Tokenizer(library)
    ids = tokenizer.encode("a<think>é")
    assert library.token_to_id("<think>") in ids
    assert tokenizer.decode(ids) == "a<think>é"


def test_whole_words_first_cannot_reach_a_special_token() -> None:
    """llama-bpe takes a word that is in the vocabulary as it stands; a special token may be such a word."""
    vocabulary = ["x", "y", "xy"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [1, 1, 3],
        "tokenizer.ggml.merges": ["x y"],
    }
    tokenizer = Tokenizer(tokenizer_from_gguf(metadata))
    assert tokenizer.encode("xy") == [0, 1]
    assert tokenizer.encode("xy", special=True) == [2]


def test_a_character_may_be_unknown() -> None:
    library = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>"))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken("<unk>", special=True, normalized=False)])
    assert Tokenizer(library).encode("aé") == [1, 0]


# The beginning of a text


def test_only_the_very_beginning_gets_a_space_where_the_tokenizer_says_first() -> None:
    tokenizer = Tokenizer(_metaspace("first"))
    assert [tokenizer.token(id) for id in tokenizer.encode("ab")] == ["▁", "a", "b"]
    assert [tokenizer.token(id) for id in tokenizer.encode(" ab")] == ["▁", "a", "b"]
    assert [tokenizer.token(id) for id in tokenizer.encode("<s>ab<s> a", special=True)] == [
        *("<s>", "a", "b", "<s>", "▁", "a")
    ]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("text", ["ab", " ab", "<s>ab", "<s> ab", "ab<s>ab<s>", "<t>ab", "a<t>b <t>", ""])
def test_spaces_at_the_beginning_are_those_of_the_library(scheme: str, text: str) -> None:
    library, tokenizer = _metaspace(scheme), Tokenizer(_metaspace(scheme))
    assert tokenizer.encode(text, special=True) == library.encode(text, add_special_tokens=False).ids


def _metaspace(scheme: Any) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2}, []))
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)])
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    library.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    library.add_tokens([AddedToken("<t>", special=False, normalized=False)])
    return library


def test_truncation_and_padding_of_the_file_are_off() -> None:
    library = tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer()))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    assert len(Tokenizer(library).encode("0123456789")) == 10


# Decoding


def test_decoding_gives_the_text_back(tokenizer: Tokenizer) -> None:
    """Where a space is put before a text, one that it begins with is lost; SentencePiece writes a space as ▁."""
    for text in [*HANDWRITTEN, *generated(100, seed=1)]:
        expected = text.removeprefix(" ").replace("▁", " ") if tokenizer.strips_first_space else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize("text", SURROGATES)
def test_lone_surrogates_become_the_replacement_character(text: str, tokenizer: Tokenizer) -> None:
    decoded = tokenizer.decode(tokenizer.encode(text))
    assert decoded == text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def test_decoding_equals_the_library_where_bytes_are_whole(tokenizer: Tokenizer) -> None:
    for text in HANDWRITTEN:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stream_gives_the_same_text_however_it_is_cut(data: st.DataObject, tokenizer: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(-1, tokenizer.token_count + 1), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    stream, text = TextStream(tokenizer), []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        text.append(stream.push(ids[start:end]))
        text[-1].encode()
    text.append(stream.flush())
    assert "".join(text) == tokenizer.decode(ids)


def test_a_stream_waits_for_whole_characters() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    assert [stream.push([id]) for id in tokenizer.encode("é🙂!")] == ["", "é", "", "", "", "🙂", "!"]
    assert stream.flush() == ""


@pytest.mark.parametrize("given", ["🙂".encode()[:3], b"\xe4\xb8", b"\xc3"])
def test_flush_closes_an_incomplete_character(given: bytes) -> None:
    tokenizer = byte_level()
    alphabet = {tokenizer.bytes_of(id): id for id in range(tokenizer.token_count)}
    stream = TextStream(tokenizer)
    assert stream.push([alphabet[bytes([byte])] for byte in given]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_stream_never_shows_special_or_hidden_tokens(tokenizer: Tokenizer) -> None:
    hidden = tokenizer.encode("x")[-1]
    stream = TextStream(tokenizer, hidden=frozenset({hidden}))
    assert stream.push([*tokenizer.special_ids, hidden, -5, 10**9]) + stream.flush() == ""


def test_only_the_tokenizers_own_first_space_is_stripped() -> None:
    tokenizer = spm()
    the = tokenizer.encode("the")
    stream = TextStream(tokenizer)
    assert [stream.push(the), stream.push(the), stream.flush()] == ["the", " the", ""]


# Malformed input


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": null}', b"\xff\xfe\x00", b"[1, 2]"])
def test_a_malformed_tokenizer_json_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_file(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_tokenizer_json_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.json: no such file"):
        Tokenizer.from_file(tmp_path / "no.json")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_a_decoder_that_is_not_known_is_refused(decoder: Any) -> None:
    library = _metaspace("first")
    library.decoder = decoder
    with pytest.raises(UnsupportedModel, match="decoder"):
        Tokenizer(library)


GPT2: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<e>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    ("change", "error", "line"),
    [
        ({"model": "bert"}, UnsupportedModel, "GGUF tokenizer type 'bert' is not supported"),
        ({"model": None}, UnsupportedModel, "GGUF tokenizer type None is not supported"),
        ({"pre": "martian"}, UnsupportedModel, "the GGUF pre-tokenizer 'martian' is not supported"),
        ({"pre": 3}, UnsupportedModel, "the GGUF pre-tokenizer 3 is not supported"),
        ({"tokens": []}, CheckpointError, "the GGUF metadata holds no tokenizer (tokenizer.ggml.tokens)"),
        ({"tokens": None}, CheckpointError, "the GGUF metadata holds no tokenizer (tokenizer.ggml.tokens)"),
        ({"tokens": "abc"}, CheckpointError, "GGUF metadata tokenizer.ggml.tokens is not a list"),
        ({"tokens": [1, 2]}, CheckpointError, "GGUF metadata tokenizer.ggml.tokens must hold only str"),
        ({"tokens": ["a", "a", "b", "ab"]}, CheckpointError, "the GGUF tokenizer holds the same token twice"),
        ({"token_type": [1]}, CheckpointError, "the GGUF tokenizer has 4 tokens but 1 types"),
        ({"merges": ["ab"]}, CheckpointError, "the GGUF tokenizer holds a malformed merge: 'ab'"),
        ({"merges": [""]}, CheckpointError, "the GGUF tokenizer holds a malformed merge: ''"),
        ({"merges": ["a z"]}, CheckpointError, "the GGUF tokenizer is malformed: "),
        (
            {"model": "llama", "tokens": ["a", "b", "c", "x" * 20000], "scores": [0.0] * 4},
            CheckpointError,
            "the GGUF tokenizer's tokens are implausibly long",
        ),
        ({"model": "llama"}, CheckpointError, "the GGUF tokenizer is of type llama but has no score for every token"),
    ],
)
def test_malformed_gguf_metadata_is_one_line(change: dict[str, Any], error: type[Exception], line: str) -> None:
    metadata = {**GPT2, **{f"tokenizer.ggml.{key}": value for key, value in change.items()}}
    with pytest.raises(error) as caught:
        tokenizer_from_gguf(metadata)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("unknown", [-1, 10**9, "0", None, 2.5])
def test_an_unknown_token_that_is_no_id_is_left_out(unknown: Any) -> None:
    assert Tokenizer(tokenizer_from_gguf({**SPM_METADATA, "tokenizer.ggml.unknown_token_id": unknown})).encode("é")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutated_metadata_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    metadata = dict(data.draw(st.sampled_from([GPT2, SPM_METADATA])))
    junk = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers()))
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(list(metadata)))
        value = metadata[key]
        if isinstance(value, list) and value and data.draw(st.booleans()):
            changed = list(value)
            changed[data.draw(st.integers(0, len(value) - 1))] = data.draw(junk)
            metadata[key] = changed[: data.draw(st.sampled_from([len(value), len(value) // 2]))]
        else:
            metadata[key] = data.draw(junk)
    try:
        Tokenizer(tokenizer_from_gguf(metadata)).encode("a b é<s>")
    except (CheckpointError, UnsupportedModel) as error:
        assert "\n" not in str(error)  # noqa: PT017


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_mutated_tokenizer_json_is_read_or_refused_in_one_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(json.dumps(byte_tokenizer()).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content), len(content) // 2]))])
    try:
        Tokenizer.from_file(path).encode("a b é<s>")
    except (CheckpointError, UnsupportedModel) as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_the_metadata_says_whether_a_text_begins_with_bos() -> None:
    def prefix(**keys: Any) -> list[int]:
        metadata = {**GPT2, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
        return prefix_ids(tokenizer_from_gguf(metadata))

    assert prefix() == []
    assert prefix(bos_token_id=3) == []
    assert prefix(bos_token_id=3, add_bos_token=True) == [3]
    assert prefix(bos_token_id=3, pre="llama-bpe") == [3]
    assert prefix(bos_token_id=3, pre="llama-bpe", add_bos_token=False) == []
    assert prefix(bos_token_id=99, add_bos_token=True) == []


# Stop strings


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_a_reply_ends_before_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    ends = [(end, end - len(stop), stop) for stop in stops for end in range(len(stop), len(text) + 1)]
    found = min((item for item in ends if text[item[1] : item[0]] == item[2]), default=None)
    guard, shown = StopStrings(stops), ""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        shown += guard.push(text[start:end])
        assert (text if found is None else text[: found[1]]).startswith(shown)
    shown += guard.flush()
    assert shown == (text if found is None else text[: found[1]])
    assert guard.matched == (None if found is None else found[2])
    assert found is None or guard.push("more") == ""


def test_only_what_could_be_a_stop_string_is_held_back() -> None:
    guard = StopStrings(["\nUser:", "</s>"])
    assert [guard.push(piece) for piece in ("Hi", "\n", "Us", "b", "<", "/s")] == ["Hi", "", "", "\nUsb", "", ""]
    assert guard.flush() == "</s"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="a stop string is empty"):
        StopStrings(["x", ""])


def test_a_replacement_that_grows_without_bound_is_refused() -> None:
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    nested = {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [grow, grow, grow]}]}
    for normalizer in (grow, nested):
        with pytest.raises(UnsupportedModel, match="times as long"):
            Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer() | {"normalizer": normalizer})))
    Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer() | {"normalizer": space})))


def test_a_tokenizer_that_fails_on_a_text_is_one_line() -> None:
    words = {"type": "WordLevel", "vocab": {"a": 3}, "unk_token": "[UNK]"}
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer() | {"model": words})))
    with pytest.raises(CheckpointError, match=r"the tokenizer fails on this text: .*UNK"):
        tokenizer.encode("b")


def test_a_text_of_megabytes_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer())))
    longest = 0
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, special: bool = False) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, special)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    with pytest.raises(ContextOverflow, match="The prompt has 3000000 characters, too many for a context of 400000"):
        tokenizer.refuse_longer("abc" * 1_000_000, 400_000)
    assert 0 < longest <= 1 << 18
    tokenizer.refuse_longer("abc" * 100_000, 300_000)  # exactly the context
