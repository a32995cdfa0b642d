"""Trained heads on disk and on the Hugging Face hub: model.safetensors, config.json and a model card. No pickle."""

import hashlib
from pathlib import Path

import safetensors.torch
import torch
from huggingface_hub import HfApi, constants, snapshot_download

from ssd_train.backbones.base import Backbone
from ssd_train.finite import require_finite
from ssd_train.heads.predictors import Heads, HeadSpec, name
from ssd_train.processes.files import read_json, sealed, sha256, write_atomically, write_together

CARD = """---
library_name: ssd_train
tags: [speculative-decoding, image-generation]
---
# Spatially Speculative Decoding heads for {backbone}

{heads[k_horizontal]} horizontal and {heads[k_vertical]} vertical heads ({parameters:.1f}M parameters, \
{heads[space]} space) for a {grid[0]}x{grid[1]} token grid, trained by self-distillation from {training[samples]} \
images. Load them with `ssd_train.heads.export.load_heads(directory or hub id, backbone)`, or decode with \
`decode.heads=` the same: both refuse any backbone but the one with fingerprint `{fingerprint}`.

## Validation on held-out prompts
{validation}

## Decoding with the exported heads
{measured}
"""


FILES = "model.safetensors", "config.json", "README.md"
FIELDS = {"heads": dict, "grid": list, "backbone": str, "fingerprint": str, "training": dict, "weights": str}
MEND = "export the heads again (stages=[export]), or copy them again"


class HeadsError(ValueError):
    """An export does not fit, by name."""


def save_heads(directory: str | Path, heads: Heads, backbone: Backbone, training: dict) -> None:
    """Writes the export. The one before it stays until this one is whole on the disk.

    ``training`` is a JSON-able summary: "samples", "validation" (metrics by name) and whatever else is known. Raises
    HeadsError for weights that are NaN or infinite.
    """
    directory = Path(directory)
    require_finite(heads.state_dict(), "training left them so; lower head.lr, and train again", HeadsError)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in heads.state_dict().items()}
    weights = safetensors.torch.save(tensors)
    config = {
        "format": 2,
        "heads": heads.config(),
        "grid": [backbone.grid.height, backbone.grid.width],
        "end_of_line": backbone.grid.end_of_line,
        "backbone": backbone.name,
        "fingerprint": backbone.fingerprint,
        "training": training,
        "weights": hashlib.sha256(weights).hexdigest(),
    }
    write_together({
        directory / "config.json": sealed(config, "config.json", indent=2),
        directory / "README.md": _card(config, "Not measured yet."),
        directory / "model.safetensors": weights,
    })  # fmt: skip


def write_card(directory: Path, config: dict, measured: str) -> None:
    """The model card; ``measured`` is a markdown table of decoding figures."""
    write_atomically(Path(directory) / "README.md", _card(config, measured))


def _card(config: dict, measured: str) -> bytes:
    metrics = config["training"].get("validation", {})
    rows = ["| head | acceptance rate | top-1 agreement |", "|---|---|---|"]
    labels = {name(*pair): "{} +{}".format(*pair) for pair in HeadSpec(**config["heads"]).offsets()}
    for key, label in labels.items():
        figures = [metrics.get(f"validation/{metric}/{key}") for metric in ("acceptance", "top1")]
        if None not in figures:
            rows.append(f"| {label} | {figures[0]:.3f} | {figures[1]:.3f} |")
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Heads(HeadSpec(**config["heads"])).parameters())
    stale, corrected = (metrics.get(f"validation/corrector/{kind}") for kind in ("stale", "corrected"))
    if corrected is not None:
        rows += ["", f"Stale drafts are accepted at a rate of {stale:.3f} as they are, {corrected:.3f} corrected."]
    card = CARD.format(**config, parameters=parameters / 1e6, validation="\n".join(rows), measured=measured)
    return card.encode()


def read_config(directory: str | Path) -> dict:
    path = Path(directory) / "config.json"
    config = read_json(path, MEND, HeadsError)
    if config is None:
        raise HeadsError(f"{directory} holds no exported heads (no config.json); run the train and export stages first")
    for field, kind in FIELDS.items():
        if not isinstance(config.get(field), kind):
            raise HeadsError(f"{path}: {field} is {config.get(field)!r}; expected a {kind.__name__}; {MEND}")
    try:
        HeadSpec(**config["heads"])
    except (ValueError, TypeError) as error:
        raise HeadsError(f"{path} does not describe heads that this version knows: {error}; {MEND}") from error
    return config


def load_heads(source: str | Path, backbone: Backbone, revision: str | None = None) -> Heads:
    """Heads in eval mode, float32, on the CPU, from a directory or the hub. Raises HeadsError naming what does not fit:
    the backbone's fingerprint, the grid, the width or vocabulary, a missing, unexpected or
    mis-shaped tensor, one with NaN or infinite numbers."""
    directory = heads_folder(source, revision)
    config = read_config(directory)
    expected = {
        "grid": [backbone.grid.height, backbone.grid.width],
        "end_of_line": backbone.grid.end_of_line,
        "fingerprint": backbone.fingerprint,
    }
    found = {key: config.get(key) for key in expected}
    for key in "width", "vocabulary":
        expected[key], found[key] = getattr(backbone, key), config["heads"].get(key)
    for key, value in expected.items():
        if found[key] != value:
            raise HeadsError(
                f"the heads in {directory} were trained for {key} {found[key]} (backbone {config.get('backbone')}), "
                f"but {backbone.name} has {value}"
            )
    return _read_heads(directory, config)


def _read_heads(directory: Path, config: dict) -> Heads:
    """Nothing is built before the sizes in config.json are those in the header of model.safetensors."""
    path, spec = directory / "model.safetensors", HeadSpec(**config["heads"])
    try:
        with safetensors.safe_open(path, "pt") as file:
            there = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
            if spec.k_horizontal + spec.k_vertical + (spec.corrector.depth if spec.corrector else 0) > len(there):
                raise HeadsError(f"{path} holds {len(there)} tensors; expected those of {spec}; {MEND}")
            with torch.device("meta"):
                heads = Heads(spec)
            wanted = {key: tuple(tensor.shape) for key, tensor in heads.state_dict().items()}
            if wanted != there:
                wrong = sorted(key for key in wanted.keys() | there.keys() if wanted.get(key) != there.get(key))
                lines = [
                    f"  {key}: expected {wanted.get(key, 'nothing')}, found {there.get(key, 'nothing')}"
                    for key in wrong
                ]
                raise HeadsError("\n".join([f"{path} does not match its config.json; {MEND}:", *lines[:20]]))
            if sha256(path) != config["weights"]:
                raise HeadsError(f"{path} is damaged: it is not what config.json beside it was written with; {MEND}")
            tensors = {key: file.get_tensor(key).float() for key in wanted}
    except (OSError, safetensors.SafetensorError) as error:
        raise HeadsError(f"{path} cannot be read ({error}); {MEND}") from error
    require_finite(tensors, f"{path} drafts nothing; train and export again", HeadsError)
    heads.load_state_dict(tensors, assign=True)
    return heads.eval().requires_grad_(False)


# -- the hub ------------------------------------------------------------------------------------------------------


def heads_folder(source: str | Path, revision: str | None = None) -> Path:
    """The directory of exported heads. A string that names none here may be a hub id, "owner/name" or
    "owner/name@revision": its files are downloaded, or found in the hub's cache. Raises HeadsError if they are neither
    here nor to be had."""
    if isinstance(source, Path) or Path(source).is_dir() or source.count("/") != 1:
        return Path(source)
    repository, _, pinned = source.partition("@")
    revision = revision or pinned or None
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=FILES))
    except Exception as error:  # of whatever library the hub's speaks HTTP with
        at = f" --revision {revision}" if revision else ""
        offline = " HF_HUB_OFFLINE is set, so nothing was downloaded." if constants.HF_HUB_OFFLINE else ""
        raise HeadsError(
            f"{source} is no directory here, and no heads of that name are to be had from the Hugging Face hub."
            f"{offline} Where there is a network, run `hf download {repository}{at}` and bring that machine's hub "
            f"cache (HF_HOME) here, or copy the files and name their directory. The hub's own message: {error}"
        ) from error


def push_heads(directory: str | Path, repository: str, private: bool = True, revision: str | None = None) -> str:
    """Puts an export with its card, and so with what was measured, into "owner/name" on the hub, which is made if it is
    not there; returns the commit's URL. Whoever `hf auth login` or HF_TOKEN says does it: no token passes through here.

    Raises HeadsError for what is no whole export, and if the hub cannot be reached or refuses.
    """
    directory = Path(directory)
    _read_heads(directory, read_config(directory))
    api = HfApi(library_name="ssd_train")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=directory, allow_patterns=list(FILES), revision=revision,
            commit_message="Spatially Speculative Decoding heads",
        )  # fmt: skip
    except Exception as error:
        raise HeadsError(
            f"{directory} was not pushed to {repository}; expected an owner/name that you may write to, a network, and "
            f"to be logged in (`hf auth login`). The hub's own message: {error}"
        ) from error
    return commit.commit_url
