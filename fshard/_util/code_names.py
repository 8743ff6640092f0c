"""Names of globals that the code of a function reads."""

from __future__ import annotations

import dis
import functools
from types import CodeType

GLOBAL_LOADS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
"""Instructions that read a name of a function's globals; class bodies have the last two."""


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> frozenset[str]:
    """Return the names that code, and functions in it, load as globals.

    `co_names` also has the names of attributes and of imported modules.

    >>> sorted(global_names((lambda x: [torch.relu(y.scale) for y in x]).__code__))
    ['torch']
    """
    names = {i.argval for i in dis.get_instructions(code) if i.opname in GLOBAL_LOADS}
    if "globals" in names:  # globals()["name"]
        names.update(const for const in code.co_consts if isinstance(const, str))
    nested = [const for const in code.co_consts if isinstance(const, CodeType)]
    return frozenset(names.union(*map(global_names, nested)))
