"""Where the decode kernel's tiled weights lie: what another kernel needs to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kernels.cuda.plan import Phase, Split, tiles_index

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TiledWeights:
    """Every SM's stream of tiles, one after the other in `data` (uint8, on the device), and how they are cut."""

    data: Tensor
    phases: Mapping[str, Phase]
    split: Split
    layers: int

    def places(self, phase: str) -> np.ndarray:
        """int64 [tiles, 3], bytes: a tile's offset in layer 0, its stride from layer to layer, from chunk to chunk."""
        index, split, found = tiles_index(phase), self.split, []
        piece = self.phases[phase].units * self.phases[phase].unit_bytes  # of one tile in one chunk
        ahead = list(self.phases)[: list(self.phases).index(phase)]  # in a layer
        for count, offset, layer_bytes in zip(split.count, split.offset, split.layer_bytes, strict=True):
            if phase == "head":  # behind all layers
                first, layer_stride = offset + self.layers * layer_bytes, 0
            else:
                before = sum(count[tiles_index(name)] * self.phases[name].tile_bytes for name in ahead)
                first, layer_stride = offset + before, layer_bytes
            found += [(first + tile * piece, layer_stride, count[index] * piece) for tile in range(count[index])]
        return np.array(found, dtype=np.int64).reshape(-1, 3)
