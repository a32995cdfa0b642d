"""Janus and Janus-Pro (transformers' ``Janus``): an image vocabulary of its own, no end-of-line tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration, PreTrainedTokenizerFast

from ssd_train.backbones.base import Backbone, PromptBatch
from ssd_train.backbones.checkpoints import family_folder, fast_tokenizer, numerics, require_complete, require_known
from ssd_train.backbones.sketches import byte_tokenizer, random_model
from ssd_train.grid import Grid

PROMPT = "<|User|>: {text}\n\n<|Assistant|>:"


class Janus(Backbone):
    """Built by :meth:`load` from a checkpoint, or from a model and tokenizer that are already there.

    The unconditional context is the prompt with every id but begin-of-sentence and begin-of-image replaced by pad;
    these pads are attended, as transformers' own ``generate`` does it.
    """

    model_type = JanusConfig.model_type

    def __init__(
        self,
        model: JanusForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast | None,
        generation: GenerationConfig,
        name: str = "janus",
        grid: Sequence[int] | None = None,
        prompt: str = PROMPT,
    ):
        """``grid`` (height, width) defaults to the one that the checkpoint was tuned for."""
        height, width = grid or _grid(model.config)
        vision = model.model
        super().__init__(
            name=name,
            model=model,
            decoder=vision.language_model,
            head=vision.generation_head,
            embedding=_embedding_table(model),
            grid=Grid(height, width),
        )
        vision.vqmodel.quantize.quant_state_dims = [height, width]
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.bos, self.pad = generation.bos_token_id, generation.pad_token_id
        # Where generate() looks for it, or where the converter of earlier checkpoints put it.
        further = getattr(generation, "generation_kwargs", None) or {}
        self.begin_of_image = further.get("boi_token_id", getattr(generation, "boi_token_id", None))
        for key, value in {"bos": self.bos, "pad": self.pad, "begin-of-image": self.begin_of_image}.items():
            if value is None:
                raise ValueError(f"{name}: the checkpoint's generation_config.json names no {key} token id")

    @classmethod
    def load(
        cls,
        checkpoint: str,
        name: str = "janus",
        grid: Sequence[int] | None = None,
        prompt: str = PROMPT,
        dtype: str = "bfloat16",
        device: str = "cpu",
        revision: str | None = None,
        attention: str = "sdpa",
    ) -> "Janus":
        """Loads a local directory or a hub id; strict: a missing or unexpected tensor is an error, and so is a ``grid``
        that is not the one the checkpoint was tuned for."""
        how = numerics(dtype, attention)
        folder = family_folder(checkpoint, revision, cls.model_type)
        own = _grid(JanusConfig.from_pretrained(folder))
        if grid is not None and list(grid) != own:
            raise ValueError(f"{name} has no grid {list(grid)} (height, width); expected {own}, or null for it")
        tokenizer = fast_tokenizer(folder)
        generation = GenerationConfig.from_pretrained(folder)
        model, report = JanusForConditionalGeneration.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported by name, below
            **how,
        )
        require_complete(report, checkpoint, "Janus")
        return cls(model.to(device), tokenizer, generation, name, grid, prompt)

    @classmethod
    def sketch(
        cls, architecture: dict, name: str = "janus", grid: Sequence[int] | None = None, prompt: str = PROMPT, **how
    ) -> "Janus":
        """The same with random weights; ``how`` is for :func:`random_model`."""
        model = random_model(JanusForConditionalGeneration, JanusConfig.from_dict(architecture), **how)
        ids = {"bos_token_id": 0, "pad_token_id": 1, "generation_kwargs": {"boi_token_id": 2}}
        return cls(model, byte_tokenizer({}, reserved=range(3)), GenerationConfig(**ids), name, grid, prompt)

    def encode_prompts(self, texts: Sequence[str]) -> PromptBatch:
        conditional, unconditional = [], []
        for text in texts:
            require_known(self.tokenizer, text, self.name)
            ids = self.tokenizer(self.prompt.format(text=text), add_special_tokens=False)["input_ids"]
            ids = [self.bos, *ids, self.begin_of_image]
            conditional.append(ids)
            unconditional.append([i if i in (self.bos, self.begin_of_image) else self.pad for i in ids])
        return PromptBatch.collate(conditional, unconditional, self.pad)

    @torch.inference_mode()
    def decode_pixels(self, tokens: Tensor) -> Tensor:
        pixels = self.model.decode_image_tokens(tokens.flatten(1).to(self.device))
        return pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).cpu()

    @torch.inference_mode()
    def encode_pixels(self, images: Tensor) -> Tensor:
        pixels = images.to(self.device).permute(0, 3, 1, 2).to(self.dtype) / 127.5 - 1
        codes = self.model.model.vqmodel.encode(pixels).image_tokens
        return codes.view(len(images), self.grid.height, self.grid.width)

    def reference_logits(self, prompts: PromptBatch, tokens: Tensor) -> Tensor:
        fed = self.model.prepare_embeddings_for_image_generation(tokens[:, :-1]).repeat(prompts.streams, 1, 1)
        attend = prompts.attend.flatten(0, 1).to(self.device)
        attend = torch.cat([attend, attend.new_ones(fed.shape[:2])], 1)
        hidden = self.model.model.language_model(
            inputs_embeds=torch.cat([self.embed_prompt(prompts), fed], 1),
            attention_mask=attend.long(),
            position_ids=(attend.long().cumsum(1) - 1).clamp_min(0),
            use_cache=False,
        ).last_hidden_state
        return self.model.model.generation_head(hidden[:, prompts.ids.shape[-1] - 1 :])


def _grid(config: JanusConfig) -> list[int]:
    """As high as the images that it understands, and as wide as the tokens that ``generate`` draws allow."""
    vision = config.vision_config
    height = vision.image_size // vision.patch_size
    return [height, vision.num_image_tokens // height]


@torch.no_grad()
def _embedding_table(model: JanusForConditionalGeneration) -> Tensor:
    """The aligned input embeddings [V, d] of all image tokens, so that feeding one is a look-up."""
    ids = torch.arange(model.config.vq_config.num_embeddings, device=model.device)
    return model.prepare_embeddings_for_image_generation(ids)
