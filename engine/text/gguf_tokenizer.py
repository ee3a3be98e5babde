"""Rebuilds a `tokenizers` tokenizer from the vocabulary that a GGUF file carries in its metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from engine.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPECIAL_TYPES = frozenset({_UNKNOWN, _CONTROL, _UNUSED})

_MAX_CUTTING = 200_000_000  # characters to look at while deriving merges; 128256 real tokens need 10 million

# How text is cut into words before merging, by tokenizer.ggml.pre: the regular expressions of the models' own
# tokenizer.json (Split, Isolated), applied in turn.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGIT_GPT2 = (r"\p{N}", _GPT2)
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_WORD_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "refact", "starcoder", "codeshell", "command-r", "exaone", "minerva-7b"), _DIGIT_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (_CL100K,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})  # ignore_merges in their tokenizer.json
_ADD_BOS = _WHOLE_WORDS_FIRST  # where the file does not say
_NFC = frozenset({"qwen2", "deepseek-r1-qwen", "megrez"})  # their tokenizer.json normalises first


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer described by `tokenizer.ggml.*`: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    Control, unknown and unused tokens become special tokens. Raises UnsupportedModel for another kind or an unknown
    pre-tokenizer, CheckpointError when the metadata is malformed.
    """
    vocabulary = _Vocabulary(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(vocabulary, metadata)
        elif kind == "llama":
            tokenizer = _sentencepiece(vocabulary, metadata)
        else:
            raise UnsupportedModel(f"GGUF tokenizer type {kind!r} is not supported", "flint reads gpt2 and llama")
        vocabulary.mark_added(tokenizer)
    except (CheckpointError, UnsupportedModel):
        raise
    except BaseException as error:
        if not from_the_library(error):
            raise
        raise CheckpointError(f"the GGUF tokenizer is malformed: {' '.join(str(error).split())}") from None
    _add_bos(tokenizer, metadata, vocabulary)
    return tokenizer


def from_the_library(error: BaseException) -> bool:
    """Whether an error tells of bad data: tokenizers raises bare Exception, and where its Rust code panics on what it
    did not expect, a PanicException that is only a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class _Vocabulary:
    """tokens, types and scores by id, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.tokens: list[str] = _list(metadata, "tokenizer.ggml.tokens", str)
        if not self.tokens:
            raise CheckpointError("the GGUF metadata holds no tokenizer (tokenizer.ggml.tokens)")
        # An empty token cannot be produced; it only needs a name of its own to keep its id.
        self.tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(self.tokens)]
        self.types: list[int] = _list(metadata, "tokenizer.ggml.token_type", int) or [1] * len(self.tokens)
        self.scores: list[float] = _list(metadata, "tokenizer.ggml.scores", float)
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise CheckpointError("the GGUF tokenizer holds the same token twice")
        if len(self.types) != len(self.tokens):
            raise CheckpointError(f"the GGUF tokenizer has {len(self.tokens)} tokens but {len(self.types)} types")

    def mark_added(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Declare what is matched before any merging: special tokens, and user-defined ones."""
        from tokenizers import AddedToken

        special, ordinary = [], []
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind in _SPECIAL_TYPES:
                special.append(AddedToken(token, special=True, normalized=False))
            elif kind == _USER_DEFINED:
                ordinary.append(AddedToken(token, special=False, normalized=False))
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(ordinary)


def _byte_level(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    patterns = _WORD_PATTERNS.get(pre) if isinstance(pre, str) else None
    if patterns is None:
        raise UnsupportedModel(
            f"the GGUF pre-tokenizer {pre!r} is not supported", f"flint knows {', '.join(sorted(_WORD_PATTERNS))}"
        )
    merges = _merges(_list(metadata, "tokenizer.ggml.merges", str), vocabulary)
    model = models.BPE(vocabulary.ids, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    tokenizer = Tokenizer(model)
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(lines: list[str], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Merge rules "left right", without any that would build a special token from plain text."""
    special = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in _SPECIAL_TYPES}
    merges = []
    for line in lines:
        left, separator, right = line[1:].partition(" ")  # the first character may itself be a space
        if not separator or not right:
            raise CheckpointError(f"the GGUF tokenizer holds a malformed merge: {line[:40]!r}")
        left = line[0] + left
        if left + right not in special:
            merges.append((left, right))
    return merges


def _sentencepiece(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CheckpointError("the GGUF tokenizer is of type llama but has no score for every token")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocabulary.ids,
        _merges_by_score(vocabulary),
        unk_token=vocabulary.tokens[unknown] if _is_id(unknown, vocabulary) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    # "always": text after a special token begins a word too, unless it starts with a space of its own.
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to build a normal token from two others, best score first, as SentencePiece's BPE does."""
    if sum(len(token) ** 2 for token in vocabulary.tokens) > _MAX_CUTTING:
        raise CheckpointError("the GGUF tokenizer's tokens are implausibly long")
    normal = {
        token: id
        for id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind not in _SPECIAL_TYPES and kind not in (_USER_DEFINED, _BYTE)
    }
    merges = [
        (-vocabulary.scores[id], id, normal[token[:cut]], token[:cut], token[cut:])
        for token, id in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_bos(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> None:
    """Put the begin-of-text token before a bare text (never before a template, which writes its own)."""
    from tokenizers import processors

    wanted = metadata.get(
        "tokenizer.ggml.add_bos_token",
        metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _ADD_BOS,
    )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if wanted and _is_id(bos, vocabulary):
        tokenizer.post_processor = processors.TemplateProcessing(single="BOS $A", special_tokens=[("BOS", bos)])


def _is_id(value: Any, vocabulary: _Vocabulary) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < len(vocabulary.tokens)


def _list(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """The list under key, [] where there is none; numbers as Python's own."""
    value = metadata.get(key)
    if value is None:
        return []
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise CheckpointError(f"GGUF metadata {key} is not a list")
    accepted = (int, float) if kind is float else kind
    if not all(isinstance(item, accepted) for item in values):
        raise CheckpointError(f"GGUF metadata {key} must hold only {kind.__name__}")
    return list(values)
