"""Modes that measure the tensors that a block creates: the largest, and all that live at once."""

from __future__ import annotations

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.layout.tree import tensors_in


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            self.numel = max(self.numel, x.numel())
        return out


class LiveBytes(TorchDispatchMode):
    """Peak bytes of the tensors that operations of a block return and that live at once.

    Memory within PyTorch's kernels is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            if x.is_meta:
                continue
            storage = x.untyped_storage()
            self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: row for key, row in self.live.items() if not row[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out
