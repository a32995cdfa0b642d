"""The contract between a frozen backbone and everything else.

A new backbone is one file (a subclass of :class:`Backbone`) and one yaml. Shapes: B samples, S streams (the conditional
one, then for CFG the unconditional one), R = S*B rows, stream after stream, P prompt slots, n tokens in a block, L
image tokens, d width, V image vocabulary.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssd_train.backbones.attention import shared_keys
from ssd_train.backbones.kv_cache import KVCache, Slots
from ssd_train.finite import require_finite
from ssd_train.grid import Grid


@dataclass(frozen=True)
class PromptBatch:
    """Everything before the first image token, left-padded: ids and attend are [S, B, P]."""

    ids: Tensor  # int64
    attend: Tensor  # bool, False on left padding

    @property
    def streams(self) -> int:
        return self.ids.shape[0]

    def guided(self, guidance: float) -> "PromptBatch":
        """The streams that sampling with this guidance needs: at 1 the conditional one alone, half the work."""
        return PromptBatch(self.ids[:1], self.attend[:1]) if guidance == 1 else self

    @classmethod
    def collate(cls, conditional: Sequence[list[int]], unconditional: Sequence[list[int]], pad: int) -> "PromptBatch":
        """Left-pads two lists of B id lists to one length."""
        rows = [*conditional, *unconditional]
        length = max(map(len, rows))
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows])
        attend = torch.tensor([[False] * (length - len(row)) + [True] * len(row) for row in rows])
        return cls(ids.view(2, -1, length), attend.view(2, -1, length))


class OutputLayers(nn.Module):
    """The frozen ends of a backbone, all that training heads needs of it: input embeddings of image tokens, final
    norm and image head."""

    def __init__(self, embedding: Tensor, end_of_line_embedding: Tensor | None, norm: nn.Module, head: nn.Module):
        super().__init__()
        self.register_buffer("embedding", embedding.detach(), persistent=False)  # [V, d]
        self.register_buffer("end_of_line_embedding", end_of_line_embedding, persistent=False)  # [d]
        self.norm, self.head = norm, head

    def embed(self, tokens: Tensor) -> Tensor:
        """Image tokens [...] int64 -> input embeddings [..., d]; -1 is the end-of-line token."""
        if self.end_of_line_embedding is None:
            return F.embedding(tokens, self.embedding)
        embedded = F.embedding(tokens.clamp_min(0), self.embedding)
        return torch.where((tokens < 0)[..., None], self.end_of_line_embedding, embedded)

    def readout(self, hidden: Tensor) -> Tensor:
        """States H before the final norm [..., d] -> image logits [..., V], float32 (float64 stays)."""
        logits = self.head(self.norm(hidden))
        return logits if logits.dtype == torch.float64 else logits.float()


class Backbone(nn.Module, ABC):
    """A frozen autoregressive image model, taken apart at the input of its final norm.

    Subclasses set in ``__init__`` (through ``super().__init__``) the transformers ``model``; its ``decoder``
    stack, whose final ``norm`` is taken out so that the decoder returns states H *before* it; the ``head`` from
    normed states to image logits; the input embedding tables of image tokens and, if the grid has it, of the
    end-of-line token. They implement prompts and pixels.
    """

    model_type: str | None = None  # what a checkpoint's config.json says, if a subclass wants that checked

    def __init__(
        self,
        *,
        name: str,
        model: nn.Module,
        decoder: nn.Module,
        head: nn.Module,
        embedding: Tensor,
        grid: Grid,
        end_of_line_embedding: Tensor | None = None,
    ):
        super().__init__()
        if grid.end_of_line != (end_of_line_embedding is not None):
            raise ValueError(f"{grid} needs an end-of-line embedding exactly if it has end-of-line tokens")
        self.name = name
        self.grid = grid
        self.model = model.eval().requires_grad_(False)
        self.decoder = decoder
        self.output = OutputLayers(embedding, end_of_line_embedding, decoder.norm, head)
        require_finite(model.state_dict(), f"the weights of {name} are damaged; get its checkpoint again")
        self.fingerprint = fingerprint(model)
        self._attention = decoder.config._attn_implementation
        self._take_apart()

    # -- what a subclass implements -----------------------------------------------------------------------------

    @abstractmethod
    def encode_prompts(self, texts: Sequence[str]) -> PromptBatch:
        """Texts -> both streams' contexts, ending with the token whose state predicts image token 0."""

    @abstractmethod
    def decode_pixels(self, tokens: Tensor) -> Tensor:
        """Tokens [B, h, w] int64 -> images [B, H, W, 3] uint8."""

    @abstractmethod
    def encode_pixels(self, images: Tensor) -> Tensor:
        """Images [B, H, W, 3] uint8 -> tokens [B, h, w] int64."""

    @abstractmethod
    def reference_logits(self, prompts: PromptBatch, tokens: Tensor) -> Tensor:
        """The transformers class's own image logits [R, L, V], from one uncached forward pass of the intact model
        over prompt and tokens [B, L], which may be the first L of an image. The yardstick for :meth:`readout`; call
        it inside :meth:`intact`."""

    # -- the same for every family ------------------------------------------------------------------------------

    @property
    def vocabulary(self) -> int:
        return self.output.embedding.shape[0]

    @property
    def width(self) -> int:
        return self.output.embedding.shape[1]

    @property
    def device(self) -> torch.device:
        return self.output.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.output.embedding.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """See :meth:`OutputLayers.embed`."""
        return self.output.embed(tokens)

    def readout(self, hidden: Tensor) -> Tensor:
        """See :meth:`OutputLayers.readout`."""
        return self.output.readout(hidden)

    def embed_prompt(self, prompts: PromptBatch) -> Tensor:
        """[R, P, d]"""
        return self.model.get_input_embeddings()(prompts.ids.flatten(0, 1).to(self.device))

    def new_cache(self, prompts: PromptBatch) -> KVCache:
        """An empty KV cache with room for the prompts and a whole image."""
        attend = prompts.attend.flatten(0, 1).to(self.device)
        length = attend.shape[1]
        padding = (~attend).sum(1)
        layers = self.decoder.config.num_hidden_layers
        return KVCache(padding, length, length + self.grid.sequence_length, layers)

    def forward(self, embedded: Tensor, slots: Slots, cache: KVCache, layers: int | None = None) -> Tensor:
        """One pass over a block: embeddings [R, n, d] written at ``slots`` -> states H [R, n, d] before the final norm.

        The state at a slot predicts the token of the next one. With ``layers``, the first so many layers only.
        """
        mask = cache.begin(slots)
        if self.decoder.config._attn_implementation == "eager":
            # transformers' eager attention adds its mask: a bool one would be silently wrong
            mask = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)
        stack = self.decoder.layers
        if layers is not None:
            self.decoder.layers = stack[:layers]
        try:
            return self.decoder(
                inputs_embeds=embedded,
                attention_mask=mask,
                position_ids=cache.positions(),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        finally:
            self.decoder.layers = stack

    def prefill(self, prompts: PromptBatch, cache: KVCache) -> Tensor:
        """Feeds the prompts; returns H[0], the state [R, d] that predicts image token 0."""
        slots = Slots.span(0, cache.prompt_length, self.device)
        return self(self.embed_prompt(prompts), slots, cache)[:, -1]

    @torch.inference_mode()
    def teacher_force(self, prompts: PromptBatch, tokens: Tensor) -> Tensor:
        """States H [S, B, L, d] that predict the given tokens [B, L], in one pass after the prompt's."""
        cache = self.new_cache(prompts)
        first = self.prefill(prompts, cache)
        index, position, predicts = self.grid.feed_plan(range(self.grid.size - 1))
        fed = torch.cat([tokens, tokens.new_full((tokens.shape[0], 1), -1)], 1)[:, position]
        slots = Slots.span(cache.prompt_length, cache.prompt_length + len(index), self.device)
        hidden = self(self.embed(fed).repeat(prompts.streams, 1, 1), slots, cache)
        keep = [i for i, p in enumerate(predicts) if p >= 0]
        hidden = torch.cat([first[:, None], hidden[:, keep]], 1)
        return hidden.view(prompts.streams, -1, *hidden.shape[1:])

    @contextmanager
    def intact(self) -> Iterator[nn.Module]:
        """The transformers model as it was loaded, its final norm back in place."""
        self.decoder.norm = self.output.norm
        self.decoder.config._attn_implementation = self._attention
        try:
            yield self.model
        finally:
            self._take_apart()

    def _take_apart(self) -> None:
        self.decoder.norm = nn.Identity()
        config = self.decoder.config
        if self._attention == "sdpa" and config.num_key_value_heads < config.num_attention_heads:
            config._attn_implementation = shared_keys.__name__

    @torch.inference_mode()
    def readout_error(self, prompts: PromptBatch, tokens: Tensor, hidden: Tensor) -> float:
        """max |readout(H) - the class's own logits| / max |logits|, for tokens [B, L] and their states
        [S, B, L, d]: near rounding if the states were taken before the norm and in the right order, else of order 1."""
        with self.intact():
            reference = self.reference_logits(prompts, tokens)
        errors, magnitudes = [], []
        for row, expected in zip(hidden.flatten(0, 1), reference, strict=True):  # all at once would not fit a GPU
            expected = expected.to(torch.float64)
            errors.append((self.readout(row).to(torch.float64) - expected).abs().max())
            magnitudes.append(expected.abs().max())
        return float(torch.stack(errors).max() / torch.stack(magnitudes).max())


def fingerprint(model: nn.Module, samples_per_tensor: int = 4096) -> str:
    """A hash of the weights that does not depend on the dtype they were loaded in.

    Hashes every parameter's name, shape and up to ``samples_per_tensor`` evenly strided elements, rounded to
    bfloat16: a few MB to read for a 7B model, and no fine-tune, other revision or re-initialised tensor passes.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        flat = flat[:: max(1, -(-flat.numel() // samples_per_tensor))]
        digest.update(json.dumps([name, list(tensor.shape)]).encode())
        if not flat.is_meta:
            digest.update(flat.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
