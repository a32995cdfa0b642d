"""Emu3 (transformers' ``Emu3``): image tokens in the text vocabulary, an end-of-line token after each row."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer, Emu3Config, Emu3ForConditionalGeneration, PreTrainedTokenizerBase

from ssd_train.backbones.base import PromptBatch
from ssd_train.backbones.checkpoints import family_folder, numerics, require_complete
from ssd_train.backbones.shared_vocabulary import SharedVocabulary, to_uint8
from ssd_train.backbones.sketches import byte_tokenizer, emu3_names, random_model
from ssd_train.grid import Grid

BOS, BEGIN_OF_IMAGE, BEGIN_OF_TOKENS = "<|extra_203|>", "<|image start|>", "<|image token|>"
# What Emu3's own image_generation.py appends to every prompt and contrasts it with.
QUALITY = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst "
    "quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
RATIOS = ("1:1", "4:3", "3:4", "3:2", "2:3", "16:9", "9:16")
AREA = 720 * 720


def image_grid(ratio: str, area: int = AREA, pixels_a_token: int = 8) -> Grid:
    """The grid of an aspect ratio "width:height" at an area in pixels: 90x90 for 1:1, 68x120 for 16:9."""
    if ratio not in RATIOS:
        raise ValueError(f"Emu3 has no ratio {ratio!r} (width:height); expected one of {', '.join(RATIOS)}")
    if area < 1:
        raise ValueError(f"Emu3's area is {area} pixels; expected {AREA}, as published, or another of 1 or more")
    width, height = map(int, ratio.split(":"))
    scale = (area / (width * height)) ** 0.5 / pixels_a_token
    return Grid(round(height * scale), round(width * scale), end_of_line=True)


class Emu3(SharedVocabulary):
    """Built by :meth:`load` from a checkpoint, or from a model and tokenizer that are already there.

    Both contexts end with begin-of-image, the grid's size as text and begin-of-tokens; the unconditional one has
    the negative prompt in place of the text.
    """

    model_type = Emu3Config.model_type

    def __init__(
        self,
        model: Emu3ForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "emu3",
        ratio: str = "1:1",
        area: int = AREA,
        quality: str = QUALITY,
        negative: str = NEGATIVE,
    ):
        mapping, vq = model.model.vocabulary_mapping, model.model.vqmodel
        super().__init__(
            name=name,
            model=model,
            decoder=model.model.text_model,
            grid=image_grid(ratio, area, vq.vision_spatial_factor),
            image_ids=mapping.img2bpe,
            codes=vq.config.codebook_size,
            end_of_line=mapping.eol_token_id,
        )
        for token in (tokenizer.bos_token, BEGIN_OF_IMAGE, BEGIN_OF_TOKENS):
            if token is None or len(tokenizer(token, add_special_tokens=False)["input_ids"]) != 1:
                raise ValueError(f"{name}: {token!r} is not one token of this tokenizer; expected Emu3-Gen-hf's")
        positions = self.decoder.config.max_position_embeddings
        if self.grid.sequence_length >= positions:  # it would draw on, at positions it has never seen
            raise ValueError(
                f"{name} has no area of {area} pixels: at {ratio} these are {self.grid.sequence_length} tokens, and it "
                f"knows {positions} positions, the prompt's included; lower model.backbone.area (published: {AREA})"
            )
        self.tokenizer = tokenizer
        self.quality, self.negative = quality, negative

    @classmethod
    def load(
        cls,
        checkpoint: str,
        name: str = "emu3",
        ratio: str = "1:1",
        area: int = AREA,
        quality: str = QUALITY,
        negative: str = NEGATIVE,
        dtype: str = "bfloat16",
        device: str = "cpu",
        revision: str | None = None,
        attention: str = "sdpa",
    ) -> "Emu3":
        """Loads a local directory or a hub id; strict: a missing or unexpected tensor is an error."""
        image_grid(ratio, area)  # before minutes of loading
        how = numerics(dtype, attention)
        folder = family_folder(checkpoint, revision, cls.model_type)
        words = AutoTokenizer.from_pretrained(folder)
        model, report = Emu3ForConditionalGeneration.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused by name below
            **how,
        )
        require_complete(report, checkpoint, "Emu3")
        return cls(model.to(device), words, name, ratio, area, quality, negative)

    @classmethod
    def sketch(
        cls, architecture: dict, name: str = "emu3", ratio: str = "1:1", area: int = AREA, quality: str = QUALITY,
        negative: str = NEGATIVE, **how,
    ) -> "Emu3":  # fmt: skip
        """The same with random weights; ``how`` is for :func:`random_model`."""
        config = Emu3Config.from_dict(architecture)
        config.vocabulary_map = names = config.vocabulary_map or emu3_names(
            config.vq_config.codebook_size, config.text_config.vocab_size
        )
        special = {token: names.get(token, i) for i, token in enumerate((BOS, BEGIN_OF_IMAGE, BEGIN_OF_TOKENS))}
        words = byte_tokenizer(special, names.values())
        words.bos_token = BOS
        model = random_model(Emu3ForConditionalGeneration, config, **how)
        return cls(model, words, name, ratio, area, quality, negative)

    def encode_prompts(self, texts: Sequence[str]) -> PromptBatch:
        conditional = [self._context(text + self.quality) for text in texts]
        unconditional = [self._context(self.negative)] * len(texts)
        return PromptBatch.collate(conditional, unconditional, self.decoder.config.pad_token_id)

    def _context(self, text: str) -> list[int]:
        size = f"{BEGIN_OF_IMAGE}{self.grid.height}*{self.grid.width}{BEGIN_OF_TOKENS}"
        # As one string: the tokenizer splits it at the special tokens.
        text = f"{self.tokenizer.bos_token}{text}{size}"
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def decode_pixels(self, tokens: Tensor) -> Tensor:
        # One by one: an image is decoded as a clip of several frames, at full resolution.
        vq = self.model.model.vqmodel
        return torch.cat([to_uint8(vq.decode(image[None])) for image in tokens.to(self.device)])

    @torch.inference_mode()
    def encode_pixels(self, images: Tensor) -> Tensor:
        vq = self.model.model.vqmodel
        pixels = self.normalised(images, vq.vision_spatial_factor, self.dtype)
        codes = [vq.encode(image[None], [images.shape[1:3]]).image_tokens[0] for image in pixels]
        return torch.stack(codes)
