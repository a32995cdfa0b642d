"""What a decoding did, judgement by judgement."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Trace:
    """What happened, for metrics and maps: these read nothing else.

    ``passes`` [B] backbone passes a sample, the prompt's included; ``unsound`` counts draft distributions that were NaN
    or infinite, for which the uniform one stood in; ``fed`` the tokens a row of each pass;
    ``seconds`` wall-clock by part ("prompt", "draft", "pass", "judge"). The rest are parallel arrays, one entry a
    judged item: the pass it followed, its sample, position, round (judgements since it was drafted, from 1), whether
    it had a draft, whether that was accepted, the token that stood then, and the (rows, columns) offset it was first
    drafted at.
    """

    passes: list[int]
    unsound: int = 0
    fed: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    pass_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sample: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    position: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    round: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    drafted: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    accepted: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    token: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    offset: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int64))

    def tensors(self) -> dict[str, Tensor]:
        """All but ``seconds``, to be stored."""
        values = {name: value for name, value in vars(self).items() if name != "seconds"}
        return {name: torch.as_tensor(value) for name, value in values.items()}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> "Trace":
        lists = {name: tensors[name].tolist() for name in ("passes", "fed", "unsound")}
        return cls(**(tensors | lists))
