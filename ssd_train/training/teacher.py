"""The frozen backbone in a training process: states that no cache holds."""

from collections.abc import Sequence

from torch import Tensor

from ssd_train.backbones.base import Backbone


class Teacher:
    """Tokens to the states that predict them, by one teacher-forced pass; of both CFG streams where ``guidance`` needs
    them."""

    def __init__(self, backbone: Backbone, guidance: float):
        self.backbone, self.guidance = backbone, guidance

    def __call__(self, prompts: Sequence[str], tokens: Tensor) -> Tensor:
        """Tokens [B, h, w] int64 of images for B prompts -> float32 states [S, B, h, w, d], which autograd may keep."""
        context = self.backbone.encode_prompts(prompts).guided(self.guidance)
        hidden = self.backbone.teacher_force(context, tokens.flatten(1))
        return hidden.float().clone().unflatten(2, tokens.shape[1:])
