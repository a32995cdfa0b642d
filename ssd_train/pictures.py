"""Pictures of a prompt source, as the uint8 RGB that people see."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps


class Picture:
    """A picture that is read when it is asked for. ``value`` is the path of an image file, relative to ``folder``, the
    file's bytes, or {"bytes", "path"} with one of these, as data sets hold pictures; ``where`` names its row."""

    def __init__(self, value: Any, folder: Path, where: str):
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if not isinstance(value, str | bytes):
            raise ValueError(f"{where}: {str(value)[:80]!r} is no picture; expected an image file's path or its bytes")
        self.value, self.folder, self.where = value, folder, where

    def content(self) -> bytes:
        """Raises ValueError if there is no such file."""
        if isinstance(self.value, bytes):
            return self.value
        path = self.folder / self.value
        try:
            return path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{self.where}: the picture {path} cannot be read ({error.strerror}); paths are relative to the file "
                "that names them"
            ) from error

    def digest(self) -> str:
        """Of what decides the pixels."""
        return hashlib.sha256(self.content()).hexdigest()[:16]

    def __call__(self) -> np.ndarray:
        """uint8 [H, W, 3], upright. 16-bit grey is scaled, and what is transparent stands on white. Raises ValueError
        for a file that is none, or cut short."""
        try:
            with Image.open(io.BytesIO(self.content())) as image:
                return np.asarray(_rgb(ImageOps.exif_transpose(image)))
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            name = self.value if isinstance(self.value, str) else "its bytes"
            raise ValueError(f"{self.where}: no whole picture in {name} ({error}); replace it") from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits, which convert() would clip
        return Image.fromarray((np.asarray(image) / 257 + 0.5).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
