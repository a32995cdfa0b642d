"""Checkpoints of a training: whole and this training's, or not used."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from ssd_train.processes.files import DamagedFile, replacing

FIELDS = {"training", "processes", "global_step", "state_dict"}


class Checkpoints(TorchCheckpointIO):
    """A new one replaces the old one when it is whole, and carries the training's fingerprint, after which its file is
    named. Lightning's own way leads through memory and the temporary directory, and, where that is another file system,
    piece by piece over the old one."""

    def save_checkpoint(self, checkpoint: dict, path: str, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as file:
            try:
                torch.save(checkpoint | {"training": Path(path).stem}, file)
            except RuntimeError as error:  # "unexpected pos": torch hides why the file could not be written
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, OSError):
                    cause = cause.__context__
                raise cause or error from None


def read_checkpoint(path: Path, device: str = "meta") -> dict[str, Any]:
    """A checkpoint with its tensors on this device. Every byte of it is read first. Raises DamagedFile if it is not
    what :class:`Checkpoints` wrote under this name, FileNotFoundError if there is none."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged:
            raise ValueError(f"the checksum of {damaged} is wrong")
        content = torch.load(path, map_location=device, weights_only=True, mmap=True)
        if not isinstance(content, dict) or not content.keys() >= FIELDS:
            raise ValueError(f"expected {', '.join(sorted(FIELDS))} in it")
        if content["training"] != path.stem:
            raise ValueError(f"it is of the training {content['training']}")
        return content
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # whatever zipfile, pickle and torch make of damaged bytes
        raise DamagedFile(f"{path} is no whole checkpoint of this training ({error}); remove it") from error
