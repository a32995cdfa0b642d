"""What families share whose image tokens are ids of the text vocabulary.

Input embeddings and readout are the rows of the text tables that belong to image tokens, in codebook order, so
that token 0..V-1 is a codebook entry. R rows, P prompt slots, L image tokens, V image vocabulary, d width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.grid import Grid


class SharedVocabulary(Backbone):
    """A model with an ``lm_head`` over text and image tokens, and an end-of-line token after each row."""

    def __init__(
        self,
        *,
        name: str,
        model: PreTrainedModel,
        decoder: nn.Module,
        grid: Grid,
        image_ids: Mapping[int, int],
        codes: int,
        end_of_line: int,
    ):
        """``image_ids`` maps each of the ``codes`` codebook entries to its id; ``end_of_line`` is an id."""
        if sorted(image_ids) != list(range(codes)):
            raise ValueError(
                f"{name}: the checkpoint's vocabulary_map names {len(image_ids)} image tokens; expected one for "
                f"each of the {codes} codebook entries"
            )
        table = model.get_input_embeddings().weight.detach()
        ids = torch.tensor([image_ids[code] for code in range(codes)], device=table.device)
        head = nn.Linear(table.shape[1], codes, bias=False, device="meta")
        head.weight = nn.Parameter(model.lm_head.weight.detach()[ids], requires_grad=False)
        super().__init__(
            name=name,
            model=model,
            decoder=decoder,
            head=head,
            embedding=table[ids],
            grid=grid,
            end_of_line_embedding=table[end_of_line].clone(),
        )
        # One more, so that token -1 is the end of a line here too.
        self.register_buffer("ids", torch.cat([ids, ids.new_tensor([end_of_line])]), persistent=False)  # [V + 1]

    def reference_logits(self, prompts: PromptBatch, tokens: Tensor) -> Tensor:
        """[R, L, V], also for the first L tokens only."""
        _, position, predicts = self.grid.feed_plan(range(tokens.shape[1] - 1))
        fed = torch.cat([tokens, tokens.new_full((len(tokens), 1), -1)], 1)[:, position]
        ids = torch.cat([prompts.ids.flatten(0, 1).to(self.device), self.ids[fed].repeat(prompts.streams, 1)], 1)
        length = prompts.ids.shape[-1]
        attend = torch.ones_like(ids)
        attend[:, :length] = prompts.attend.flatten(0, 1)
        # Not through the class's own forward: Chameleon's overwrites the logits of all image tokens.
        hidden = self.decoder(
            input_ids=ids,
            attention_mask=attend,
            position_ids=(attend.cumsum(1) - 1).clamp_min(0),
            use_cache=False,
        ).last_hidden_state
        keep = [length - 1, *(length + i for i, predicted in enumerate(predicts) if predicted >= 0)]
        # Row by row, because the whole vocabulary's logits are large.
        return torch.stack([self.model.lm_head(row)[..., self.ids[:-1]] for row in hidden[:, keep]])

    def normalised(self, images: Tensor, pixels_a_token: int, dtype: torch.dtype) -> Tensor:
        """Images [B, H, W, 3] uint8 -> [B, 3, H, W] in [-1, 1]. Raises ValueError if the grid is for another size."""
        expected = (self.grid.height * pixels_a_token, self.grid.width * pixels_a_token)
        if tuple(images.shape[1:3]) != expected:
            raise ValueError(
                f"{self.name} got images of {images.shape[1]}x{images.shape[2]} pixels (height x width); its "
                f"{self.grid.height}x{self.grid.width} grid needs {expected[0]}x{expected[1]}"
            )
        return images.to(self.device).permute(0, 3, 1, 2).to(dtype) / 127.5 - 1


def to_uint8(pixels: Tensor) -> Tensor:
    """[B, 3, H, W] in [-1, 1] -> [B, H, W, 3] uint8, on the CPU."""
    pixels = pixels.float().add(1).mul(127.5).round().clamp(0, 255)
    return pixels.permute(0, 2, 3, 1).to(torch.uint8).cpu()
