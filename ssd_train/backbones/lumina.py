"""Lumina-mGPT (transformers' ``Chameleon``): image tokens are text ids, an end-of-line token ends each row."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, PreTrainedTokenizerFast

from ssd_train.backbones.base import PromptBatch
from ssd_train.backbones.chameleon_pixels import MISSING, ChameleonPixels
from ssd_train.backbones.checkpoints import family_folder, fast_tokenizer, fill, numerics, per_head_norms, read_tensors
from ssd_train.backbones.shared_vocabulary import SharedVocabulary, to_uint8
from ssd_train.backbones.sketches import byte_tokenizer, chameleon_names, random_model
from ssd_train.grid import Grid

PROMPT = "Generate an image of {width}x{height} according to the following prompt:\n{text}"
BOS, SEPARATOR, BEGIN_OF_IMAGE, END_OF_LINE = "<s>", "<reserved08706>", "<racm3:break>", "<reserved08799>"
NO_TOKENIZER = "set model.backbone.tokenizer=Alpha-VLLM/Lumina-mGPT-7B-768, or a directory with its tokenizer"
PATCH = 32  # the unit, in pixels, that image sizes are told in; two tokens


def known_sizes(resolution: int) -> list[tuple[int, int]]:
    """(height, width) in pixels of the images a checkpoint was tuned on: at each width the greatest height
    within the area of ``resolution`` squared, down to that of the next width, and sides within 4:1."""
    patches = (resolution // PATCH) ** 2
    return sorted(
        (h * PATCH, w * PATCH)
        for w in range(1, patches + 1)
        for h in range(max(1, patches // (w + 1)), patches // w + 1)
        if max(h, w) <= 4 * min(h, w)
    )


def _checked_size(name: str, resolution: int, size: Sequence[int] | None) -> tuple[int, int]:
    height, width = size or (resolution, resolution)
    if (height, width) not in known_sizes(resolution):
        known = ", ".join(f"{h}x{w}" for h, w in known_sizes(resolution))
        raise ValueError(f"{name} has no size {height}x{width} (height x width); expected one of {known}")
    return height, width


class Lumina(SharedVocabulary):
    """Built by :meth:`load` from a checkpoint, or from a model and tokenizer that are already there.

    Both contexts end with begin-of-image and the size, which the model is not left to choose; the
    unconditional one is nothing else, and starts at position 0.
    """

    model_type = ChameleonConfig.model_type

    def __init__(
        self,
        model: ChameleonForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast,
        name: str = "lumina",
        resolution: int = 768,
        size: Sequence[int] | None = None,
        pixels: ChameleonPixels | None = None,
    ):
        """``resolution`` is the checkpoint's; ``size`` (height, width) in pixels defaults to the square."""
        self.image_size = height, width = _checked_size(name, resolution, size)
        self._names = model.config.vocabulary_map or {}
        super().__init__(
            name=name,
            model=model,
            decoder=model.model,
            grid=Grid(2 * height // PATCH, 2 * width // PATCH, end_of_line=True),
            image_ids=model.model.vocabulary_mapping.img2bpe,
            codes=model.config.vq_config.num_embeddings,
            end_of_line=self._id(END_OF_LINE),
        )
        self.tokenizer = tokenizer
        self.pixels = pixels
        sides = [self._id(f"<reserved{8800 + side // PATCH:05d}>") for side in (height, width)]
        self._begin = [self._id(BEGIN_OF_IMAGE), *sides]

    @classmethod
    def load(
        cls,
        checkpoint: str,
        name: str = "lumina",
        tokenizer: str | None = None,
        tokenizer_revision: str | None = None,
        resolution: int = 768,
        size: Sequence[int] | None = None,
        vqgan: str | None = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
        revision: str | None = None,
        attention: str = "sdpa",
    ) -> "Lumina":
        """Loads a local directory or a hub id; strict: a missing or unexpected tensor is an error.

        ``tokenizer`` is another checkpoint to take it from: of the published ones only the 768 has one. ``vqgan`` is
        the path of Meta's VQGAN, for pixels.
        """
        _checked_size(name, resolution, size)
        how = numerics(dtype, attention)
        folder = family_folder(checkpoint, revision, cls.model_type)
        config = ChameleonConfig.from_pretrained(folder)
        words = fast_tokenizer(tokenizer or folder, tokenizer_revision, NO_TOKENIZER)
        pixels = ChameleonPixels.load(vqgan, config.vq_config).to(device) if vqgan else None
        tensors = per_head_norms(read_tensors(folder, how["dtype"], device), config)
        with torch.device("meta"):
            model = ChameleonForConditionalGeneration._from_config(config, **how)
        if not any(key.startswith("model.vqmodel.") for key in tensors):
            del model.model.vqmodel  # tuning dropped the VQ encoder, and so the published checkpoints lack it
        fill(model, tensors, checkpoint)
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its numbers are in no checkpoint
        return cls(model, words, name, resolution, size, pixels)

    @classmethod
    def sketch(
        cls, architecture: dict, name: str = "lumina", resolution: int = 768, size: Sequence[int] | None = None, **how
    ) -> "Lumina":
        """The same with random weights and no VQ encoder; ``how`` is for :func:`random_model`."""
        config = ChameleonConfig.from_dict(architecture)
        config.vocabulary_map = names = config.vocabulary_map or chameleon_names(config.vq_config.num_embeddings)
        model = random_model(ChameleonForConditionalGeneration, config, **how)
        del model.model.vqmodel
        return cls(model, byte_tokenizer({}, names.values()), name, resolution, size)

    def encode_prompts(self, texts: Sequence[str]) -> PromptBatch:
        conditional = []
        for text in texts:
            text = PROMPT.format(height=self.image_size[0], width=self.image_size[1], text=text)
            words = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            conditional.append([self._id(BOS), *words, self._id(SEPARATOR), *self._begin])
        return PromptBatch.collate(conditional, [self._begin] * len(texts), self._id(BOS))

    def _id(self, name: str) -> int:
        if name not in self._names:
            raise ValueError(f"the checkpoint's vocabulary_map has no {name}; expected that of Chameleon")
        return self._names[name]

    @torch.inference_mode()
    def decode_pixels(self, tokens: Tensor) -> Tensor:
        if self.pixels is None:
            raise FileNotFoundError(f"{self.name}: {MISSING}")
        return torch.cat([to_uint8(self.pixels.decode(image[None])) for image in tokens.to(self.device)])

    @torch.inference_mode()
    def encode_pixels(self, images: Tensor) -> Tensor:
        vq = self.pixels.vq if self.pixels else getattr(self.model.model, "vqmodel", None)
        if vq is None:
            raise FileNotFoundError(f"{self.name}: {MISSING}")
        pixels = self.normalised(images, 2 ** (len(vq.config.channel_multiplier) - 1), vq.dtype)
        codes = torch.cat([vq.encode(image[None]).image_tokens for image in pixels])
        return codes.view(-1, self.grid.height, self.grid.width)
