"""A draft model for nothing: the backbone's own first layers, with its own readout."""

from collections.abc import Sequence

from torch import Tensor

from ssd_train.decoding.parts import NextTokenDrafter
from ssd_train.distributions import guided_probabilities


class EarlyExit(NextTokenDrafter):
    """One token a step through the first ``layers`` layers (a self-draft, as for arXiv 2211.17192's draft model).

    Its KV cache is the backbone's: these layers' entries of a draft are what the verifying pass writes again.
    """

    def __init__(self, layers: int):
        self.layers = layers

    def bind(self, backbone, heads) -> "EarlyExit":
        depth = backbone.decoder.config.num_hidden_layers
        if not 1 <= self.layers < depth:
            raise ValueError(f"layers is {self.layers}; expected 1 to {depth - 1}, fewer than the backbone has")
        return self

    def propose(self, state, items, source, offset: Sequence[tuple[int, int]]) -> Tensor:
        return guided_probabilities(state.backbone.readout(state.last_states(source, self.layers)), state.sampling)
