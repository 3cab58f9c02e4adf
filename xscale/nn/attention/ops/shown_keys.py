"""Keys that a pattern shows to queries at any positions: a mask of all pairs, for few queries or few keys."""

import torch
from torch import Tensor

from xscale.nn.pattern.grid import Grid
from xscale.nn.pattern.pattern import Pattern


class ShownKeys:
    """The layouts of a pattern on a device, of which queries read the rows of their blocks."""

    def __init__(self, pattern: Pattern, grid: Grid, device: torch.device) -> None:
        self.block, self.first_row = grid.block, grid.first_row
        self.layouts = [
            (torch.from_numpy(layout.copy()).to(device), token_mask)
            for layout, token_mask in pattern.masked_layouts(grid)
        ]

    def of_queries(self, queries: Tensor, keys: int) -> Tensor:
        """Return whether each of the first `keys` keys is shown, bool [B, H or 1, T, S], to queries at positions
        [B, T]."""
        places = torch.arange(keys, device=queries.device)
        seen: Tensor | None = None
        for layout, token_mask in self.layouts:
            rows = layout[:, queries // self.block - self.first_row]  # [H or 1, B, T, N]
            shown = rows[..., places // self.block].transpose(0, 1)  # [B, H or 1, T, S]
            if token_mask is not None:
                shown = shown & token_mask(queries[..., None], places)[:, None]
            seen = shown if seen is None else seen | shown
        assert seen is not None
        return seen
