"""Micro backbones: real transformers classes, small enough to enumerate, with weights scaled up so that their
distributions are far from flat."""

import torch
from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration

from ssd_train.backbones.base import PromptBatch
from ssd_train.backbones.janus import Janus

BOS, PAD, BEGIN_OF_IMAGE = 1, 0, 2


def janus_config(vocabulary: int, grid: tuple[int, int], width: int = 16, layers: int = 2) -> JanusConfig:
    side = max(grid)
    vq = dict(
        embed_dim=4,
        num_embeddings=vocabulary,
        base_channels=32,
        channel_multiplier=[1, 1],
        latent_channels=32,
        num_res_blocks=0,
        num_patches=side,
        projection_dim=width,
        image_token_embed_dim=width,
    )
    text = dict(
        model_type="llama",
        vocab_size=32,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=PAD,
        bos_token_id=BOS,
    )
    vision = dict(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=2 * side,
        patch_size=2,
        num_image_tokens=side**2,
        mlp_ratio=1.0,
        projection_dim=width,
        depth=1,
    )
    return JanusConfig(text_config=text, vq_config=vq, vision_config=vision)


def janus_model(vocabulary=5, grid=(2, 3), width=16, layers=2, seed=0, scale=8.0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = JanusForConditionalGeneration(janus_config(vocabulary, grid, width, layers)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vqmodel" in name:
                continue
            if parameter.ndim > 1:
                parameter.mul_(scale)
            elif "norm" in name:
                # All ones would make RMSNorm idempotent, and states after the norm look as good as those before it.
                parameter.uniform_(0.5, 2)
    return model


def generation_config() -> GenerationConfig:
    return GenerationConfig(bos_token_id=BOS, pad_token_id=PAD, generation_kwargs={"boi_token_id": BEGIN_OF_IMAGE})


def janus(grid=(2, 3), **kwargs) -> Janus:
    return Janus(janus_model(grid=grid, **kwargs), None, generation_config(), name="micro", grid=grid)


def prompts(batch: int, unequal: bool = False) -> PromptBatch:
    """Contexts of ids that the micro models know; with ``unequal``, of different lengths."""
    lengths = [3 + (b % 3 if unequal else 0) for b in range(batch)]
    conditional = [[BOS, *[(7 * b + i) % 28 + 4 for i in range(n)], BEGIN_OF_IMAGE] for b, n in enumerate(lengths)]
    unconditional = [[BOS, *[PAD] * n, BEGIN_OF_IMAGE] for n in lengths]
    return PromptBatch.collate(conditional, unconditional, PAD)
