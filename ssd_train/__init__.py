"""Trains and validates drafting heads for Spatially Speculative Decoding.

What scripts, notebooks and yamls of others may use is named here; the rooms behind it may change.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_FRONT = {
    "Painter": "ssd_train.runs.painter",
    "load_heads": "ssd_train.heads.export",
    "push_heads": "ssd_train.heads.export",
    "DatasetPrompts": "ssd_train.prompts",
    "Backbone": "ssd_train.backbones.base",
}
__all__ = ["__version__", *_FRONT]


def __getattr__(name: str) -> Any:
    """Loads what is asked for only then: importing torch takes seconds."""
    if name not in _FRONT:
        raise AttributeError(f"ssd_train has no {name}; it has {', '.join(__all__)}")
    return getattr(import_module(_FRONT[name]), name)
