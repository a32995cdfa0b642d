"""Reading checkpoints strictly, from a local directory or a hub."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedTokenizerFast

from ssd_train.processes.files import parse_object

MEND = "copy or download the checkpoint again"
DTYPES = ("bfloat16", "float16", "float32", "float64")
ATTENTION = ("sdpa", "eager")  # flash attention would ignore the KV cache's masks


def numerics(dtype: str, attention: str) -> dict:
    """How a transformers model computes, as arguments to make one. Raises ValueError with what there is."""
    for name, value, known in ("dtype", dtype, DTYPES), ("attention", attention, ATTENTION):
        if value not in known:
            raise ValueError(f"model.backbone.{name} is {value!r}; expected one of {', '.join(known)}")
    return {"dtype": getattr(torch, dtype), "attn_implementation": attention}


def local_folder(checkpoint: str, revision: str | None = None) -> Path:
    """The directory of a checkpoint; one with a hub id is downloaded first, or found in the hub's cache. Raises
    FileNotFoundError that says what to do if it is neither here nor to be had."""
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    files = ["*.json", "*.safetensors", "*.txt"]
    try:
        return Path(snapshot_download(checkpoint, revision=revision, allow_patterns=files))
    except (OSError, HFValidationError) as error:
        at = f" --revision {revision}" if revision else ""
        offline = " HF_HUB_OFFLINE is set, so nothing was downloaded." if constants.HF_HUB_OFFLINE else ""
        raise FileNotFoundError(
            f"the checkpoint {checkpoint} is no directory here, and not to be had from the Hugging Face hub.{offline} "
            f"Where there is a network, run `hf download {checkpoint}{at}` and bring that machine's hub cache "
            "(HF_HOME) here, or copy the files and set model.backbone.checkpoint=DIRECTORY. "
            f"The hub's own message: {error}"
        ) from error


def family_folder(checkpoint: str, revision: str | None, model_type: str) -> Path:
    """:func:`local_folder`, whose config.json must be this family's. Raises FileNotFoundError or ValueError if not."""
    folder = local_folder(checkpoint, revision)
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; expected a checkpoint of model_type {model_type}")
    require_family(parse_object(file.read_bytes(), file, MEND, ValueError), model_type, checkpoint)
    return folder


def require_family(settings: Mapping, model_type: str, source: str) -> None:
    """``settings`` is a config.json, of ``source``. Raises ValueError if it is another of transformers' families, whose
    settings would be taken for ours as far as they go. A fork's name for its own passes, and so does none."""
    found = settings.get("model_type", model_type)
    if found != model_type and found in CONFIG_MAPPING:
        raise ValueError(f"the config.json of {source} says model_type {found}; expected {model_type}")


def fast_tokenizer(
    checkpoint: str | Path, revision: str | None = None, mend: str = "copy it there"
) -> PreTrainedTokenizerFast:
    """A checkpoint's tokenizer.json. Raises FileNotFoundError with the ``mend`` if there is none.

    Not AutoTokenizer: where the files say Llama, that class in some releases of transformers drops all spaces."""
    folder = local_folder(str(checkpoint), revision)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json, which prompts need; {mend}")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def read_tensors(folder: Path, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """All tensors of a safetensors checkpoint, sharded or not. Raises FileNotFoundError if a file is missing."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(parse_object(index.read_bytes(), index, MEND, ValueError)["weight_map"].values())
    tensors: dict[str, Tensor] = {}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}; expected {', '.join(sorted(names))}")
        try:
            tensors |= {key: tensor.to(dtype) for key, tensor in load_file(folder / name, device).items()}
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is no whole safetensors file ({error}); {MEND}") from error
    return tensors


def per_head_norms(tensors: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """Lumina-mGPT keeps query and key norms per group of heads, (1, head_dim) at 7B; Chameleon per head."""
    for name, heads in (".q_norm.", config.num_attention_heads), (".k_norm.", config.num_key_value_heads):
        for key in (key for key in tensors if name in key):
            if heads % len(tensors[key]) == 0:
                tensors[key] = tensors[key].repeat_interleave(heads // len(tensors[key]), 0)
    return tensors


def fill(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Makes ``tensors`` the module's own, which may be on the meta device. Raises ValueError with the names of
    those that are missing, unexpected or of another shape."""
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{source} does not fit {type(module).__name__}: {error}") from error


def require_complete(report: Mapping, checkpoint: str, family: str) -> None:
    """``report`` is transformers' ``output_loading_info``. Raises ValueError with the names of tensors that
    were missing, unexpected or of another shape: transformers goes on with random ones."""
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = {key: sorted(report[key]) for key in keys if report[key]}
    if wrong:
        raise ValueError(f"{checkpoint} is not a complete {family} checkpoint: {wrong}")


def require_known(tokenizer: PreTrainedTokenizerFast, text: str, name: str) -> None:
    """Raises ValueError for words that a tokenizer has no id for, with the nearest that it knows. One that cuts words
    into bytes knows all."""
    if tokenizer.unk_token_id is None:
        return
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    parts = zip(found["input_ids"], found["offset_mapping"], strict=True)
    unknown = dict.fromkeys(text[slice(*at)] for token, at in parts if token == tokenizer.unk_token_id)
    if unknown:
        words = sorted(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens))
        near = {word: get_close_matches(word.lower(), words, 1) for word in unknown}
        said = ", ".join(
            f"{word!r}" + (f" (did you mean {match[0]}?)" if match else "") for word, match in near.items()
        )
        known = f"; it knows {', '.join(filter(str.isalpha, words))}" if len(words) < 100 else ""
        raise ValueError(f"{name} does not know {said} in the prompt {text!r}{known}")
