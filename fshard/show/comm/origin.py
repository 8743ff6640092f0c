"""Origin of a collective: the call, the module and the user's source line that launched it."""

from __future__ import annotations

from typing import NamedTuple

from fshard.layout.spec import Spec
from fshard.run.transports.base import ObservedCall


class Origin(NamedTuple):
    """Call, layouts of a program, module path and source line of a collective."""

    name: str
    arguments: str
    ends: tuple[Spec, ...]
    module: str
    line: str

    @property
    def call(self) -> str:
        """The call of fshard with its arguments, "" for another's."""
        return f"{self.name} {self.arguments}".strip()

    @property
    def redistribution(self) -> str:
        """Source and target layout of a program, "" for other calls."""
        return " -> ".join(map(str, self.ends))


def origin_of(call: ObservedCall) -> Origin:
    """Return the origin of an observed call; backward the line and module are the forward's."""
    label = call.label
    if label is None:
        return Origin("", "", (), call.module, call.line)
    return Origin(label.name, label.arguments, label.ends, call.module, call.line)
