"""A micro Lumina-mGPT: Chameleon's class and id layout in miniature, a byte tokenizer, and Meta's VQGAN file."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ChameleonConfig, ChameleonForConditionalGeneration, PreTrainedTokenizerFast

from ssd_train.backbones.chameleon_pixels import ChameleonPixels
from ssd_train.backbones.lumina import Lumina

RESOLUTION, SIZE = 64, (32, 64)  # grids of at most 4 patches; 1x2 of them, so 2x4 tokens
DIGITS = str.maketrans("0123456789", "ABCDEFGHIJ")


def vocabulary(codes: int) -> dict[str, int]:
    """Names to ids: special tokens, image tokens in an order that is not the codebook's, reserved ones, text."""
    order = [(5 * i + 3) % codes for i in range(codes)]
    names = ["<s>", "<pad>", "</s>", "<unk>", *(f"IMGIMG{str(code).translate(DIGITS)}Z" for code in order)]
    names += ["<eoss>", "<racm3:break>", "<reserved08706>", "<reserved08799>"]
    names += [f"<reserved{8800 + n:05d}>" for n in range(1, 5)]
    names += [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<image>"]
    return {name: i for i, name in enumerate(names)}


def tokenizer(codes: int = 7) -> PreTrainedTokenizerFast:
    names = vocabulary(codes)
    backend = Tokenizer(models.BPE(vocab=names, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([name for name in names if len(name) > 1])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def config(codes: int = 7, width: int = 16, layers: int = 2) -> ChameleonConfig:
    names = vocabulary(codes)
    vq = dict(
        embed_dim=4,
        num_embeddings=codes,
        base_channels=32,
        channel_multiplier=[1, 2, 2],
        latent_channels=32,
        num_res_blocks=1,
        resolution=32,
    )
    return ChameleonConfig(
        vocab_size=len(names),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocabulary_map=names,
        vq_config=vq,
    )


def model(codes=7, width=16, layers=2, seed=0, scale=8.0, dtype=torch.float64, attention="sdpa"):
    torch.manual_seed(seed)
    made = ChameleonForConditionalGeneration._from_config(
        config(codes, width, layers), attn_implementation=attention
    ).to(dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "vqmodel" in name:
                continue
            if "q_norm" in name or "k_norm" in name:
                # The same for all heads of a group, as in the checkpoints.
                parameter.copy_(parameter[:1] + torch.randn_like(parameter[:1]) / 2)
            elif parameter.ndim > 1:
                parameter.mul_(scale)
            else:
                parameter.uniform_(0.5, 2)  # or a norm of normed states would change nothing
    return made.eval()


def lumina(size=SIZE, resolution=RESOLUTION, vqgan: Path | None = None, **kwargs) -> Lumina:
    made = model(**kwargs)
    pixels = ChameleonPixels.load(str(vqgan), made.config.vq_config) if vqgan else None
    return Lumina(made, tokenizer(made.config.vq_config.num_embeddings), "micro", resolution, size, pixels)


def save_as_published(made: ChameleonForConditionalGeneration, folder: Path, with_tokenizer: bool = True) -> None:
    """The layout of the published checkpoints: shards, norms once for all heads, no VQ encoder, an older config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: (tensor[:1] if "_norm." in key and tensor.ndim == 2 else tensor).clone()
        for key, tensor in made.state_dict().items()
        if not key.startswith("model.vqmodel.")
    }
    shards = {f"model-0000{i + 1}-of-00002.safetensors": list(tensors)[i::2] for i in range(2)}
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = {
        key: value
        for key, value in made.config.to_dict().items()
        if key not in ("rope_parameters", "dtype", "transformers_version", "image_token_id")
    }
    text |= {
        "architectures": ["ChameleonXLLMXForConditionalGeneration"],
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "mask_image_logits": False,
        "dropout": 0.05,
        "z_loss_weight": 1e-5,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0.dev0",
    }
    (folder / "config.json").write_text(json.dumps(text))
    if with_tokenizer:
        tokenizer(made.config.vq_config.num_embeddings).save_pretrained(folder)
        # What the published file says, though its tokenizer is a byte-level one.
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["tokenizer_class"] = "LlamaTokenizer"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_vqgan(folder: Path, seed: int = 0, **kwargs) -> Path:
    """A random ``vqgan.ckpt`` with Meta's names, losses included."""
    torch.manual_seed(seed)
    pixels = ChameleonPixels(config(**kwargs).vq_config)
    state = {}
    for key, tensor in pixels.state_dict().items():
        key = key.removeprefix("vq.")
        if key.startswith("decoder.up."):
            level, rest = key.removeprefix("decoder.up.").split(".", 1)
            key = f"decoder.up.{2 - int(level)}.{rest}"
        state[key] = torch.randn_like(tensor) / max(1, tensor[0].numel()) ** 0.5
    torch.save({"state_dict": state | {"loss.discriminator.weight": torch.ones(1)}}, folder / "vqgan.ckpt")
    return folder / "vqgan.ckpt"
