"""A micro Emu3: transformers' class and the id layout of Emu3-Gen-hf in miniature, with a byte tokenizer."""

import torch
from tokenizers import pre_tokenizers
from transformers import Emu3Config, Emu3ForConditionalGeneration, GPT2Tokenizer

from ssd_train.backbones.emu3 import Emu3

RATIO, AREA = "16:9", 8 * 8  # with 2 pixels a token: a 3x5 grid


def vocabulary(codes: int) -> dict[str, int]:
    """Names to ids: text, special tokens in the published order, image tokens, a placeholder."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    names += [f"<|extra_{i}|>" for i in (200, 201, 203, 204)]
    names += ["<|image token|>", "<|image start|>", "<|image end|>"]
    names += [f"<|visual token {code:06d}|>" for code in range(codes)]
    return {name: i for i, name in enumerate([*names, "<image>"])}


def tokenizer(codes: int = 7) -> GPT2Tokenizer:
    names = vocabulary(codes)
    made = GPT2Tokenizer(
        vocab=names,
        merges=[],
        unk_token="<|endoftext|>",
        bos_token="<|extra_203|>",
        eos_token="<|extra_204|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<image>",
            "boi_token": "<|image start|>",
            "eoi_token": "<|image end|>",
            "image_wrapper_token": "<|image token|>",
            "eof_token": "<|extra_201|>",
        },
    )
    made.add_special_tokens({"additional_special_tokens": [name for name in names if len(name) > 1]})
    return made


def config(codes: int = 7, width: int = 16, layers: int = 2) -> Emu3Config:
    names = vocabulary(codes)
    text = dict(
        vocab_size=len(names),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=names["<|endoftext|>"],
        bos_token_id=names["<|extra_203|>"],
        eos_token_id=names["<|extra_204|>"],
    )
    vq = dict(
        codebook_size=codes,
        embed_dim=4,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        attn_resolutions=[1],
        hidden_size=64,
    )
    return Emu3Config(text_config=text, vq_config=vq, vocabulary_map=names)


def model(codes=7, width=16, layers=2, seed=0, scale=8.0, dtype=torch.float64, attention="sdpa"):
    torch.manual_seed(seed)
    made = Emu3ForConditionalGeneration._from_config(config(codes, width, layers), attn_implementation=attention).to(
        dtype
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "vqmodel" in name:
                continue
            if parameter.ndim > 1:
                parameter.mul_(scale)
            else:
                parameter.uniform_(0.5, 2)  # or a norm of normed states would change nothing
    return made.eval()


def emu3(ratio=RATIO, area=AREA, **kwargs) -> Emu3:
    made = model(**kwargs)
    words = tokenizer(made.config.vq_config.codebook_size)
    return Emu3(made, words, "micro", ratio, area, quality=" best.", negative="bad, worst.")
