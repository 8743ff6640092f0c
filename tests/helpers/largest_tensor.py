"""Size of the largest tensor that a block creates."""

from __future__ import annotations

from typing import Any

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
