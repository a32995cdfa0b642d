"""What FID and CLIP score are computed with, at the smallest sizes and with random weights."""

import torch
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer


class Extractor(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 5, 3)

    def forward(self, pictures):
        return self.convolution(pictures / 255).flatten(2).amax(-1)


def tiny_clip(folder):
    """A CLIPModel of random weights with its processor, and a vocabulary of single letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tower = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    end = len(tokens) - 1
    config = CLIPConfig(
        text_config=tower | dict(vocab_size=len(tokens), max_position_embeddings=77, bos_token_id=end - 1,
                                 eos_token_id=end, pad_token_id=end),
        vision_config=tower | dict(image_size=16, patch_size=8),
        projection_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    CLIPProcessor(CLIPImageProcessor(**size), CLIPTokenizer(vocab=vocabulary, merges=[])).save_pretrained(folder)
    return folder
