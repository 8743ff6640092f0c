"""Results of models as other packages define them: look-alikes of `ModelOutput`, a dataclass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import register_pytree_node


class ModelOutput(OrderedDict[str, Any]):
    """Dict of the fields that are not None, which are attributes too.

    After `transformers.utils.ModelOutput` (5.23), which registers its subclasses with PyTorch.
    """

    def __init_subclass__(cls) -> None:
        def unflatten(values: Iterable[Any], keys: Any) -> ModelOutput:
            return cls(**dict(zip(keys, values, strict=True)))

        register_pytree_node(cls, lambda x: ([*x.values()], [*x.keys()]), unflatten)

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            if (value := self.__dict__.get(field.name)) is not None:
                self[field.name] = value

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else [*self.values()][key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class CausalLMOutput(ModelOutput):
    """Output of a language model."""

    loss: Any = None
    logits: Any = None
    past_key_values: Any = None
    hidden_states: Any = None


class Attributes(OrderedDict[str, Any]):
    """Dict with attributes, not registered anywhere; after `addict.Dict` and `easydict`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Carry:
    """Registered dataclass."""

    state: Any
    step: Any = None


torch.export.register_dataclass(Carry)


@dataclass
class Unregistered:
    """Dataclass that is not registered."""

    state: Any


class Layer(NamedTuple):
    """Named tuple."""

    weight: Any
    bias: Any
