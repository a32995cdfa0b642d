"""Pixels of Chameleon's image tokens: Meta's VQGAN, of which transformers has the encoder only.

The decoder is Janus's without the attention in its lowest level, its levels counted from the other end.
"""

import pickle
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import ChameleonVQVAE, ChameleonVQVAEConfig, JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAEDecoder

from ssd_train.backbones.checkpoints import fill
from ssd_train.finite import require_finite

MISSING = (
    "this model's pixels need Meta's VQGAN, which its checkpoint does not contain. It is published with "
    "Chameleon: ask for it at https://ai.meta.com/resources/models-and-libraries/chameleon-downloads/ and give the "
    "tokenizer/vqgan.ckpt you get (or a safetensors file with the same names) as model.backbone.vqgan=PATH. "
    "Nothing else needs it: the tokens are saved all the same, and can be decoded later."
)
PARTS = ("encoder.", "decoder.", "quantize.", "quant_conv.", "post_quant_conv.")


class ChameleonPixels(nn.Module):
    """Codes [B, h, w] <-> pixels [B, 3, H, W] in [-1, 1], in float32 as in Meta's own code."""

    def __init__(self, config: ChameleonVQVAEConfig):
        super().__init__()
        self.vq = ChameleonVQVAE(config)
        shared = ("base_channels", "channel_multiplier", "num_res_blocks", "latent_channels", "dropout")
        self.decoder = JanusVQVAEDecoder(JanusVQVAEConfig(**{key: getattr(config, key) for key in shared}))
        self.decoder.up[0].attn = nn.ModuleList()

    @classmethod
    def load(cls, path: str, config: ChameleonVQVAEConfig) -> "ChameleonPixels":
        """Reads ``vqgan.ckpt`` or safetensors. Raises FileNotFoundError, or ValueError with what does not fit."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}: {MISSING}")
        try:
            safe = path.endswith(".safetensors")
            state = load_file(path) if safe else torch.load(path, "cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path} holds more than tensors, so it is not loaded: {error}") from error
        pixels = cls(config)
        levels = len(config.channel_multiplier)
        renamed = {}
        for key, tensor in state.get("state_dict", state).items():
            if not key.startswith(PARTS):
                continue  # the losses of its training
            if key.startswith("decoder.up."):
                level, rest = key.removeprefix("decoder.up.").split(".", 1)
                key = f"decoder.up.{levels - 1 - int(level)}.{rest}"
            renamed[key if key.startswith("decoder.") else f"vq.{key}"] = tensor.float()
        fill(pixels, renamed, path)
        require_finite(renamed, f"{path} is damaged; get it again")
        return pixels.eval().requires_grad_(False)

    def decode(self, codes: Tensor) -> Tensor:
        latents = self.vq.quantize.embedding(codes).permute(0, 3, 1, 2)
        return self.decoder(self.vq.post_quant_conv(latents))
