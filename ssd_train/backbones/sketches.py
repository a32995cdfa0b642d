"""Backbones with random weights: to know a size before loading, to time a decoder, to run a pipeline in a test.

Their tokenizer knows bytes only. Special and image tokens have the ids of the published checkpoints, or in a smaller
vocabulary keep their order.
"""

from collections.abc import Collection, Mapping
from inspect import signature
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from ssd_train.backbones.checkpoints import MEND, numerics, require_family
from ssd_train.processes.files import parse_object

if TYPE_CHECKING:
    from ssd_train.backbones.base import Backbone


class UnknownSize(ValueError):
    """Nothing says how large a backbone is before it is loaded."""


def sketch(model: DictConfig, device: str = "meta") -> "Backbone":
    """The backbone that a ``model`` node describes, with random weights; on the meta device with none.

    Its architecture is that of the checkpoint's config.json if the checkpoint is a local directory, else
    ``model.architecture``. Raises UnknownSize if there is neither, or the adapter has no ``sketch``; ValueError for
    settings that the adapter refuses.
    """
    target = model.backbone._target_.rpartition(".")[0]
    adapter = get_object(target)
    if not hasattr(adapter, "sketch"):
        raise UnknownSize(f"the size of {model.name} is not known before it is loaded: {target} has no sketch()")
    settings = OmegaConf.to_container(model.backbone, resolve=True)
    checkpoint = settings.get("checkpoint")
    if checkpoint and (config := Path(checkpoint, "config.json")).is_file():
        settings["architecture"] = parse_object(config.read_bytes(), config, MEND, ValueError)
        if expected := getattr(adapter, "model_type", None):
            require_family(settings["architecture"], expected, checkpoint)
    elif model.get("architecture"):
        settings["architecture"] = OmegaConf.to_container(model.architecture, resolve=True)
    elif "architecture" not in settings:
        raise UnknownSize(f"the size of {model.name} is not known before it is loaded: it has no model.architecture")
    known = {*signature(adapter.sketch).parameters, *signature(random_model).parameters}
    return adapter.sketch(**{k: v for k, v in settings.items() if k in known}, name=model.name, device=device)


def random_model(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: str = "bfloat16",
    device: str = "meta",
    attention: str = "sdpa",
    scale: float = 1.0,
    seed: int = 0,
) -> PreTrainedModel:
    """A transformers model with random weights. ``scale`` multiplies matrices beside the pixel codec's: narrow
    models draw far from flat distributions only with 5 to 15 or so."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = cls._from_config(config, **numerics(dtype, attention))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if scale == 1 or "vqmodel" in name:
                    continue
                if parameter.ndim > 1:
                    parameter.mul_(scale)
                elif "norm" in name:
                    parameter.uniform_(0.5, 2)  # all ones make RMSNorm idempotent, which hides mistakes
    return model


def byte_tokenizer(special: Mapping[str, int], reserved: Collection[int] = ()) -> PreTrainedTokenizerFast:
    """Special tokens by name, and one id a byte: the lowest that are neither theirs nor ``reserved``."""
    taken = {*special.values(), *reserved}
    free = (i for i in count() if i not in taken)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={**special, **dict(zip(letters, free, strict=False))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def chameleon_names(codes: int) -> dict[str, int]:
    """Chameleon's vocabulary_map as far as adapters read it: four ids, then the image tokens, then the others."""
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    names = {"<s>": 0, "<pad>": 1} | {f"IMGIMG{str(code).translate(letters)}Z": 4 + code for code in range(codes)}
    after = 4 + codes
    reserved = {f"<reserved{n:05d}>": after + n - 8192 for n in (8706, *range(8799, 8929))}
    return names | {"<eoss>": after, "<racm3:break>": after + 1} | reserved


def emu3_names(codes: int, vocabulary: int) -> dict[str, int]:
    """Emu3's vocabulary_map as far as adapters read it: image tokens come last, special ones right before them."""
    first = vocabulary - codes
    before = {"<|extra_200|>": 8, "<|extra_203|>": 5, "<|image token|>": 3, "<|image start|>": 2}
    visual = {f"<|visual token {code:06d}|>": first + code for code in range(codes)}
    return {name: first - distance for name, distance in before.items()} | visual
