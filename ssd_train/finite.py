"""NaN and infinite numbers are found where weights enter, and named."""

from collections.abc import Mapping

import torch
from torch import Tensor


def require_finite(tensors: Mapping[str, Tensor], mend: str, error: type[Exception] = ValueError) -> None:
    """Raises ``error`` with the names of tensors that hold NaN or infinite numbers, and the ``mend``. Tensors on the
    meta device hold none."""
    wrong = [name for name, tensor in tensors.items() if not _finite(tensor)]
    if wrong:
        more = f" and {len(wrong) - 3} more tensors" if len(wrong) > 3 else ""
        raise error(f"NaN or infinite numbers in {', '.join(wrong[:3])}{more}: {mend}")


def _finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point():
        return True
    low, high = torch.aminmax(tensor.detach())  # NaN wins; no copy of the tensor is made
    return bool(torch.isfinite(low) & torch.isfinite(high))
