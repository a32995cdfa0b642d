"""Images out of transformers' own ``generate``, to compare ours with."""

import torch
from torch import Tensor

from ssd_train.backbones.base import PromptBatch
from ssd_train.backbones.shared_vocabulary import SharedVocabulary


def generate_greedily(backbone: SharedVocabulary, prompts: PromptBatch, guidance: float) -> Tensor:
    """Tokens [B, h, w]: left-padded conditional contexts, the unconditional one (the same for all) apart, and the
    grid's grammar as a constraint."""
    grid, length = backbone.grid, prompts.ids.shape[-1]
    *image, end_of_line = backbone.ids.tolist()
    negative = prompts.ids[1, 0][prompts.attend[1, 0]].repeat(prompts.ids.shape[1], 1)

    def allowed(_, ids):
        return [end_of_line] if (len(ids) - length) % (grid.width + 1) == grid.width else image

    with backbone.intact() as model:
        ids = model.generate(
            prompts.ids[0],
            attention_mask=prompts.attend[0].long(),
            negative_prompt_ids=negative,
            negative_prompt_attention_mask=torch.ones_like(negative),
            guidance_scale=guidance,
            prefix_allowed_tokens_fn=allowed,
            max_new_tokens=grid.sequence_length,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
        )
    rows = ids[:, length:].view(len(ids), grid.height, grid.width + 1)
    assert (rows[..., -1] == end_of_line).all()
    return (rows[..., :-1, None] == backbone.ids[:-1]).int().argmax(-1)
