"""Peak memory of tensors, measured on the CPU."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Peak(TorchDispatchMode):
    """The largest total size, in bytes, of the tensors that operations made inside the context and that lived at the
    same time. Scratch space within one operation is not seen."""

    def __init__(self):
        super().__init__()
        self.live = self.bytes = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        before = {x.untyped_storage().data_ptr() for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_iter(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() in before or storage in self._known:
                continue
            self._known.add(storage)
            size = storage.nbytes()
            self.live += size
            self.bytes = max(self.bytes, self.live)
            weakref.finalize(storage, self._free, size)
        return out

    def _free(self, size):
        self.live -= size
