"""What a client shares of its A: its own choice, made at the client, before anything is encoded.

The server and, through the knowledge base, other clients see what is shared as it is; see docs/trust.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from weft.lazy import torch
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.networks.flat import Layout
    from weft.wire.tensors import Payload


def shared_adaptive(adaptive: Payload, layout: Layout, share: int | Literal["all", "nothing"]) -> dict[str, Payload]:
    """All of A, the `share` rows in which it is strongest, or nothing."""
    if share == "nothing":
        return {}
    if share == "all":
        return {"adaptive": adaptive}
    value = tensors.dense(adaptive)
    strength = torch.cat([rows.square().sum(dim=1) for _, rows in layout.by_layer(value)])  # (total rows,)
    kept = torch.zeros(layout.rows, dtype=torch.bool)
    kept[strength.topk(min(share, layout.rows)).indices] = True
    return {"adaptive": tensors.Sparse.of(value * tensors.by_value(kept, layout.segments))}
