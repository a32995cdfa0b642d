"""The README's example of a backbone that is not listed: a Llama that reads words and draws in the manner of LlamaGen,
h*w image tokens in a vocabulary of their own, no end-of-line tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import JanusVQVAEConfig, LlamaConfig, LlamaModel, LlamaPreTrainedModel, PreTrainedTokenizerFast
from transformers.models.janus.modeling_janus import JanusVQVAE

from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.backbones.checkpoints import local_folder, require_complete
from ssd_train.backbones.sketches import byte_tokenizer, random_model
from ssd_train.grid import Grid


class DrawingLlama(LlamaPreTrainedModel):
    """The foreign model, as its authors might publish it. Janus's VQ codec is LlamaGen's."""

    def __init__(self, config: LlamaConfig):
        """``config.vq`` holds the codec's settings."""
        super().__init__(config)
        vq = JanusVQVAEConfig(**config.vq)
        self.model = LlamaModel(config)
        self.image_embedding = nn.Embedding(vq.num_embeddings, config.hidden_size)
        self.image_head = nn.Linear(config.hidden_size, vq.num_embeddings, bias=False)
        self.vqmodel = JanusVQVAE(vq)
        self.post_init()

    def forward(self, ids: Tensor, attend: Tensor, tokens: Tensor) -> Tensor:
        """Words [R, P] and the first image tokens [R, n] -> logits [R, n + 1, V] of image tokens 0..n."""
        embedded = torch.cat([self.model.embed_tokens(ids), self.image_embedding(tokens)], 1)
        attend = torch.cat([attend, attend.new_ones(tokens.shape)], 1).long()
        positions = (attend.cumsum(1) - 1).clamp_min(0)
        hidden = self.model(
            inputs_embeds=embedded, attention_mask=attend, position_ids=positions, use_cache=False
        ).last_hidden_state
        return self.image_head(hidden[:, ids.shape[1] - 1 :])


class LlamaGen(Backbone):
    """The adapter. Both contexts begin with <s>; the unconditional one is nothing else."""

    def __init__(self, model: DrawingLlama, tokenizer: PreTrainedTokenizerFast, name: str, grid: Sequence[int]):
        super().__init__(
            name=name,
            model=model,
            decoder=model.model,
            head=model.image_head,
            embedding=model.image_embedding.weight,
            grid=Grid(*grid),
        )
        model.vqmodel.quantize.quant_state_dims = list(grid)
        self.tokenizer = tokenizer
        self.start = tokenizer.convert_tokens_to_ids("<s>")

    @classmethod
    def load(
        cls,
        checkpoint: str,
        name: str = "llamagen",
        grid: Sequence[int] = (16, 16),
        dtype: str = "bfloat16",
        device: str = "cpu",
        revision: str | None = None,
    ) -> "LlamaGen":
        folder = local_folder(checkpoint, revision)
        model, report = DrawingLlama.from_pretrained(
            folder, dtype=getattr(torch, dtype), output_loading_info=True, ignore_mismatched_sizes=True
        )
        require_complete(report, checkpoint, "DrawingLlama")
        return cls(model.to(device), PreTrainedTokenizerFast.from_pretrained(folder), name, grid)

    @classmethod
    def sketch(cls, architecture: dict, name: str = "llamagen", grid: Sequence[int] = (16, 16), **how) -> "LlamaGen":
        """Optional: with it, the plan stage tells what a run needs before anything is loaded."""
        model = random_model(DrawingLlama, LlamaConfig.from_dict(architecture), **how)
        return cls(model, byte_tokenizer({"<s>": 0}), name, grid)

    def encode_prompts(self, texts: Sequence[str]) -> PromptBatch:
        conditional = [[self.start, *self.tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts]
        return PromptBatch.collate(conditional, [[self.start]] * len(texts), pad=self.start)

    def reference_logits(self, prompts: PromptBatch, tokens: Tensor) -> Tensor:
        ids, attend = (x.flatten(0, 1).to(self.device) for x in (prompts.ids, prompts.attend))
        return self.model(ids, attend, tokens[:, :-1].repeat(2, 1))

    @torch.inference_mode()
    def decode_pixels(self, tokens: Tensor) -> Tensor:
        pixels = self.model.vqmodel.decode(tokens.flatten(1).to(self.device)).permute(0, 2, 3, 1)
        return pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).cpu()

    @torch.inference_mode()
    def encode_pixels(self, images: Tensor) -> Tensor:
        pixels = images.to(self.device).permute(0, 3, 1, 2).to(self.dtype) / 127.5 - 1
        return self.model.vqmodel.encode(pixels).image_tokens.view(len(images), self.grid.height, self.grid.width)
