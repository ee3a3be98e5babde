"""Writes tokenizer_ids.json: the ids that llama.cpp gives to the texts of tests/engine/hard_strings.py.

    python -m tests.engine.golden.make_tokenizer_ids SmolLM2-135M-Instruct.Q4_1.gguf

It needs llama-cpp-python (0.3.36 wrote the file), which tests do not. One list per pre-tokenizer, all over smollm2's
vocabulary; `smollm special` reads special tokens as such. qwen2's texts are NFC-normalised first, as its own
tokenizer.json does and llama.cpp does not. `spm` is a small vocabulary of SentencePiece type, trained here and kept in
the file; it leaves out texts that begin with a space (llama.cpp and the models' own tokenizers differ there). null
stands for the same ids as under smollm.
"""

from __future__ import annotations

import json
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

from tests.engine.hard_strings import HANDWRITTEN, generated

PRE_TOKENIZERS = ("smollm", "refact", "gpt-2", "llama-bpe", "dbrx", "qwen2", "tekken", "default")
TEXTS = [*HANDWRITTEN, *generated(100)]
SPM_TEXTS = [text for text in TEXTS if not text.startswith(" ")]
KEYS = ("tokens", "token_type", "merges", "scores", "bos_token_id", "eos_token_id", "unknown_token_id")
SPM_CORPUS = (
    "The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore, and the shells she sells",
    "are sea shells for sure. In the beginning there was a small language model that had to learn how words are put",
    "together from pieces: first letters, then pairs of letters, then the common words of the day. def main(): return",
    "print(value) for each item in the list, while other items are not in the list. Der schnelle braune Fuchs springt.",
)


def main(gguf_path: str) -> None:
    vocabulary = read_vocabulary(gguf_path)
    ids: dict[str, Any] = {}
    for pre in PRE_TOKENIZERS:
        texts = [unicodedata.normalize("NFC", text) for text in TEXTS] if pre == "qwen2" else TEXTS
        ids[pre] = llama_cpp_ids({**vocabulary, "model": "gpt2", "pre": pre}, texts)
    for pre in PRE_TOKENIZERS[1:]:
        ids[pre] = [None if own == base else own for own, base in zip(ids[pre], ids["smollm"], strict=True)]
    ids["smollm special"] = llama_cpp_ids({**vocabulary, "model": "gpt2", "pre": "smollm"}, TEXTS, special=True)
    spm = train_spm()
    ids["spm"] = llama_cpp_ids(spm, SPM_TEXTS)
    lines = [f'"{name}": [\n' + ",\n".join(map(_compact, rows)) + "\n]" for name, rows in ids.items()]
    lines.append(f'"spm vocabulary": {_compact(spm)}')
    path = Path(__file__).with_name("tokenizer_ids.json")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_vocabulary(path: str) -> dict[str, Any]:
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    return {key: fields[f"tokenizer.ggml.{key}"].contents() for key in KEYS if f"tokenizer.ggml.{key}" in fields}


def llama_cpp_ids(vocabulary: dict[str, Any], texts: list[str], special: bool = False) -> list[list[int]]:
    """Write the vocabulary alone as a GGUF file and let llama.cpp encode with it."""
    from gguf import GGUFWriter
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        writer = GGUFWriter(file.name, "llama")
        for add in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
            getattr(writer, f"add_{add}")(64)
        writer.add_layer_norm_rms_eps(1e-5)
        for key, value in vocabulary.items():
            name = f"tokenizer.ggml.{key}"
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            else:
                writer.add_uint32(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        model = Llama(file.name, vocab_only=True, verbose=False)
        return [model.tokenize(text.encode(), add_bos=False, special=special) for text in texts]


def train_spm() -> dict[str, Any]:
    """SentencePiece's layout: control tokens, 256 byte tokens, then pieces whose score falls with their rank."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=500, min_frequency=2, show_progress=False)
    tokenizer.train_from_iterator([*SPM_CORPUS * 3, *HANDWRITTEN[:60]], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    pieces = ["".join(merge) for merge in state["merges"]] + [piece for piece in state["vocab"] if len(piece) == 1]
    pieces = [piece for piece in dict.fromkeys(pieces) if piece not in control]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "model": "llama",
        "tokens": [*control, *bytes_, *pieces],
        "token_type": [2, 3, 3, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * (len(control) + 256) + [-float(rank) for rank in range(len(pieces))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


if __name__ == "__main__":
    main(sys.argv[1])
