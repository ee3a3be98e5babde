"""What the decoder tells whoever listens: plain frozen dataclasses, the same for the screen, `chat -p` and bench."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]


@dataclass(frozen=True)
class PrefillProgress:
    """A chunk of the prompt is in the cache. done and total count tokens that had to be processed."""

    done: int
    total: int


@dataclass(frozen=True)
class Prefilled:
    """The prompt is in the cache and the first token has been chosen.

    tokens: prompt tokens processed now. cached: prompt tokens reused from the cache. seconds: time to first token.
    """

    tokens: int
    cached: int
    seconds: float


@dataclass(frozen=True)
class Tokens:
    """One decode step, or several drained together.

    ids: the new tokens. text: what became printable with them (valid UTF-8; may be empty; held back while a stop
    string could still match). drafted / accepted: draft tokens verified and accepted in these steps (0 in single
    pass). steps: verify or single steps taken (0 for the first token of a reply, which the prefill paid for).
    verify_steps: those among them that verified a draft. seconds: their duration, draft included. bytes: memory
    traffic by the ledger. position_drafted[i] / position_accepted[i]: the same counts by draft position.
    draft_seconds: the drafter's part of `seconds`. draft_mask: for each id, whether it was an accepted draft token.
    A stop token is among the ids, but never in the text.
    """

    ids: tuple[int, ...]
    text: str
    seconds: float
    bytes: int
    steps: int = 1
    verify_steps: int = 0
    accepted: int = 0
    drafted: int = 0
    position_drafted: tuple[int, ...] = ()
    position_accepted: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    draft_mask: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Note:
    """Something the user should see once, in one line (for instance: speculation switched itself off, and why)."""

    text: str


@dataclass(frozen=True)
class Usage:
    """Totals of one reply. Decode figures leave out the first token, which belongs to the prefill.

    prompt_tokens: the whole prompt, of which cached_tokens were in the KV cache already. completion_tokens: a stop
    token included.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_s: float
    prefill_s: float
    decode_s: float
    decode_steps: int
    decode_bytes: int
    verify_steps: int = 0
    accepted: int = 0
    drafted: int = 0
    draft_s: float = 0.0
    accepted_per_position: tuple[float, ...] = field(default=())

    @property
    def prefill_tok_s(self) -> float | None:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else None

    @property
    def decode_tok_s(self) -> float | None:
        tokens = self.completion_tokens - 1
        return tokens / self.decode_s if tokens > 0 and self.decode_s > 0 else None

    @property
    def bytes_per_token(self) -> float | None:
        tokens = self.completion_tokens - 1
        return self.decode_bytes / tokens if tokens > 0 else None

    @property
    def bandwidth_gb_s(self) -> float | None:
        return self.decode_bytes / self.decode_s / 1e9 if self.decode_s > 0 and self.decode_bytes else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted draft tokens / verify steps; None when no draft was verified."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None


@dataclass(frozen=True)
class Finished:
    """The reply is over. error: one line, set exactly when reason is "error"; hint: what to do about it, if known."""

    reason: FinishReason
    usage: Usage
    error: str = ""
    hint: str = ""


Event = PrefillProgress | Prefilled | Tokens | Note | Finished
