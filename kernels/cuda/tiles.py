"""Where the decode kernel's tiled weights lie: what another kernel needs to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kernels.cuda.phases import Phase, Split, tiles_index

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
        """int64 [tiles, 4], bytes: a tile's offset in layer 0, its stride from layer to layer, from chunk to chunk, and
        to the part of K that the next SM has of it."""
        index, split, found = tiles_index(phase), self.split, []
        shares = self.phases[phase].shares
        piece = self.phases[phase].units * self.phases[phase].unit_bytes  # of one tile in one chunk
        ahead = list(self.phases)[: list(self.phases).index(phase)]  # in a layer
        for sm in range(0, len(split.count), shares):
            count, offset, layer_bytes = split.count[sm], split.offset[sm], split.layer_bytes[sm]
            if phase == "head":  # behind all layers
                first, layer_stride = offset + self.layers * layer_bytes, 0
            else:
                before = sum(count[tiles_index(name)] * self.phases[name].tile_bytes for name in ahead)
                first, layer_stride = offset + before, layer_bytes
            apart = split.offset[sm + 1] - offset if shares > 1 else 0
            strides = layer_stride, count[index] * piece, apart
            found += [(first + tile * piece, *strides) for tile in range(count[index])]
        return np.array(found, dtype=np.int64).reshape(-1, 4)
