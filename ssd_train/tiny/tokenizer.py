"""The tiny backbone's text tokenizer (one id a word) and its prompts, in Janus's own format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .scenes import COLOURS, NUMBERS, RELATIONS, SHAPES

BOS, PAD, BOI, USER, ASSISTANT, UNK = SPECIAL = (
    "<|begin_of_sentence|>", "<|pad|>", "<begin_of_image>", "<|User|>", "<|Assistant|>", "<unk>",
)  # fmt: skip
PROMPT_LENGTH = 14  # ids of the longest prompt: "a red circle left of a blue square" is eight of them


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The grammar's words, in any case, and Janus's special tokens; adds the begin-of-sentence id, pads on the left."""
    words = [*NUMBERS.values(), *COLOURS, *SHAPES, *(s + "s" for s in SHAPES), "and"]
    words += " ".join(RELATIONS).split()
    vocab = {w: i for i, w in enumerate(dict.fromkeys([*SPECIAL, ":", ",", ".", *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, pad_token=PAD, unk_token=UNK, padding_side="left",
        additional_special_tokens=[BOI, USER, ASSISTANT], clean_up_tokenization_spaces=False,
    )  # fmt: skip


def encode_prompts(
    tokenizer: PreTrainedTokenizerFast, captions: Sequence[str], length: int = PROMPT_LENGTH
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 [B,length] that end in begin-of-image, left-padded, and their attention mask bool."""
    texts = [f"{USER}: {caption}\n\n{ASSISTANT}:{BOI}" for caption in captions]
    out = tokenizer(texts, padding="max_length", max_length=length, return_tensors="pt")
    return out.input_ids, out.attention_mask.bool()


def unconditional(tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor) -> torch.Tensor:
    """The guidance stream's ids: all but begin-of-sentence and -image become pad (and stay attended)."""
    boi = tokenizer.convert_tokens_to_ids(BOI)
    keep = (ids == tokenizer.bos_token_id) | (ids == boi)
    return torch.where(keep, ids, tokenizer.pad_token_id)
