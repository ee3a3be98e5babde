"""Drafts with an EAGLE-3 head, one conversation at a time.

The head's row for position t joins the feature of t with the embedding of token t + 1, so rows trail the target by
one: `extend` stores features and completes the rows whose next token is known (keys and values only: nobody reads
their output), `propose` completes the newest row with its token and rolls on from the head's own predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.drafting.base import Draft
from engine.drafting.checkpoint import load_drafter
from engine.drafting.eagle_head import EagleHead
from engine.errors import DrafterError
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize
from engine.sampling import Sampling, probabilities

Embed = Callable[[Sequence[int]], np.ndarray]


class EagleDrafter:
    """Implements engine.drafting.base.Drafter over an EagleHead, in float32 on the CPU."""

    name = "eagle"

    def __init__(self, head: EagleHead, embed: Embed, max_draft: int = 7) -> None:
        """embed(ids) -> float32 [n, hidden]: the target's embeddings, as its layer 0 receives them."""
        self.head = head.float().eval().requires_grad_(False)
        self.feature_layers = head.config.feature_layers
        self.max_draft = max_draft
        self._embed = embed
        self._position = 0
        self._capacity = 0
        self._features = torch.empty(0, head.config.hidden_size)
        shape = (head.config.num_kv_heads, 0, head.config.head_dim)
        self._keys, self._values = torch.empty(shape), torch.empty(shape)
        self._grow(512)

    @classmethod
    def of(cls, head: EagleHead, model: PackedModel) -> EagleDrafter:
        """A drafter for `model`, whose embeddings it reads row by row."""
        embedding, multiplier = model.matrix("embed"), np.float32(model.config.embedding_multiplier)
        return cls(head, lambda ids: dequantize(embedding.rows(ids)) * multiplier)

    @classmethod
    def open(cls, path: Path, model: PackedModel) -> EagleDrafter:
        """Load the drafter at `path` for `model`. Raises DrafterError (corrupt, unknown, or of another model)."""
        return cls.of(load_drafter(path, model), model)

    @property
    def position(self) -> int:
        return self._position

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], features: Mapping[int, np.ndarray]) -> None:
        if not len(tokens):
            return
        try:
            taken = [torch.from_numpy(np.asarray(features[layer], np.float32))[None] for layer in self.feature_layers]
        except KeyError as error:
            raise DrafterError(f"the target did not hand over the features of layer {error.args[0]}") from None
        end = self._position + len(tokens)
        self._grow(end + self.max_draft)
        self._features[self._position : end] = self.head.fuse(taken)[0]
        # Rows first .. end-2 have their next token; position 0 has no row before it.
        first = max(self._position - 1, 0)
        known = tokens if self._position else tokens[1:]
        if len(known):
            rows = torch.arange(first, end - 1)
            _, k, v = self.head.project(self._embedded(known), self._features[None, first : end - 1], rows)
            self._keys[:, first : end - 1], self._values[:, first : end - 1] = k[0], v[0]
        self._position = end

    def truncate(self, position: int) -> None:
        if not 0 <= position <= self._position:
            raise ValueError(f"cannot truncate to {position}: the drafter holds {self._position}")
        self._position = position

    @torch.inference_mode()
    def propose(self, token: int, count: int, sampling: Sampling) -> Draft:
        count = min(count, self.max_draft)
        if self._position == 0 or count < 1:
            return Draft(())
        config = self.head.config
        rng = None if sampling.greedy else np.random.default_rng((sampling.seed, self._position))
        ids: list[int] = []
        rows: list[np.ndarray] = []
        hidden = self._features[None, self._position - 1 : self._position]
        d2t = self.head.d2t.numpy()
        for i in range(count):
            row = self._position - 1 + i
            self._grow(row + 1)
            q, k, v = self.head.project(self._embedded([token]), hidden, torch.tensor([row]))
            self._keys[:, row : row + 1], self._values[:, row : row + 1] = k[0], v[0]
            hidden = self.head.finish(hidden, _attend(q, self._keys[:, : row + 1], self._values[:, : row + 1]))
            logits = self.head.logits(hidden)[0, 0].numpy()
            if rng is None:
                token = int(d2t[int(logits.argmax())])
            else:
                # Repeat penalty left out: the verifier's rule corrects any q, and penalised ids are target ids.
                drafted = probabilities(logits, _without_penalty(sampling), ())
                choice = int(rng.choice(len(drafted), p=drafted))
                full = np.zeros(config.target_vocab_size)
                full[d2t] = drafted
                rows.append(full)
                token = int(d2t[choice])
            ids.append(token)
        return Draft(tuple(ids), np.stack(rows) if rows else None)

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.asarray(self._embed(ids), np.float32))[None]

    def _grow(self, capacity: int) -> None:
        if capacity <= self._capacity:
            return
        extra = max(capacity, 2 * self._capacity) - self._capacity
        self._features = F.pad(self._features, (0, 0, 0, extra))
        self._keys, self._values = (F.pad(x, (0, 0, 0, extra)) for x in (self._keys, self._values))
        self._capacity += extra


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [1, heads, 1, d] over keys and values [kv_heads, n, d] -> [1, heads, 1, d]. Two small products: torch's
    own attention shares them out among threads, which takes far longer than the products."""
    grouped = q.reshape(len(keys), -1, q.shape[-1]) * q.shape[-1] ** -0.5
    return ((grouped @ keys.transpose(-1, -2)).softmax(-1) @ values).reshape(q.shape)


def _without_penalty(sampling: Sampling) -> Sampling:
    from dataclasses import replace

    return replace(sampling, repeat_penalty=1.0)
