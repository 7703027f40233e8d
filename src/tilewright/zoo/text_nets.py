"""A sentence encoder whose package holds only its weights, written with the weights' key names.

Needs the torch extra, as `nets.py` does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

WIDTH, HEADS, LAYERS, MIDDLE = 384, 12, 6, 1536
WORDS, POSITIONS, EPSILON = 30522, 512, 1e-12
MASKED = -1e4
"""Added to the scores of positions that are not looked at."""


def minilm(torch: ModuleType) -> Any:
    """Return all-MiniLM-L6-v2's encoder without weights: ids and mask to a vector a token.

    The vectors of the tokens are not pooled: the mean over `attention_mask`, normalised, is the
    sentence's embedding.
    """
    nn: Any = torch.nn

    class Embeddings(nn.Module):
        """Word, place and kind of each token."""

        def __init__(self) -> None:
            super().__init__()
            self.word_embeddings = nn.Embedding(WORDS, WIDTH)
            self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
            self.token_type_embeddings = nn.Embedding(2, WIDTH)
            self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPSILON)
            self.register_buffer("position_ids", torch.arange(POSITIONS)[None])

        def forward(self, ids: Any) -> Any:
            places = self.position_embeddings.weight[: ids.shape[1]]
            return self.LayerNorm(
                self.word_embeddings(ids) + (places + self.token_type_embeddings.weight[0])
            )

    class Scores(nn.Module):
        """Attention of every head."""

        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(WIDTH, WIDTH)
            self.key = nn.Linear(WIDTH, WIDTH)
            self.value = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any, mask: Any) -> Any:
            def heads(y: Any) -> Any:
                return y.view(1, -1, HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)

            query, key, value = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
            scores = query @ key.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
            seen = (scores + mask).softmax(-1) @ value
            return seen.permute(0, 2, 1, 3).reshape(1, -1, WIDTH)

    class Added(nn.Module):
        """A linear layer, the residual, a normalisation."""

        def __init__(self, size: int) -> None:
            super().__init__()
            self.dense = nn.Linear(size, WIDTH)
            self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPSILON)

        def forward(self, x: Any, residual: Any) -> Any:
            return self.LayerNorm(self.dense(x) + residual)

    class Layer(nn.Module):
        """Attention and the two linear layers behind it."""

        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleDict({"self": Scores(), "output": Added(WIDTH)})
            self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, MIDDLE)})
            self.output = Added(MIDDLE)

        def forward(self, x: Any, mask: Any) -> Any:
            x = self.attention["output"](self.attention["self"](x, mask), x)
            return self.output(nn.functional.gelu(self.intermediate["dense"](x)), x)

    class Net(nn.Module):
        """Embeddings and layers; the pooler belongs to the weights, sentences do not use it."""

        def __init__(self) -> None:
            super().__init__()
            self.embeddings = Embeddings()
            layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
            self.encoder = nn.ModuleDict({"layer": layers})
            self.pooler = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            mask = (1.0 - attention_mask.float())[:, None, None, :] * MASKED
            x = self.embeddings(input_ids)
            for layer in self.encoder["layer"]:
                x = layer(x, mask)
            return x

    return Net()
