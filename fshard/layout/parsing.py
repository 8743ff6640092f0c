"""`parse`, the inverse of `str(spec)`."""

from __future__ import annotations

import re
from typing import NoReturn

from fshard._util.errors import did_you_mean, fail
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import REDUCTIONS, PartitionSpec
from fshard.layout.spec import DTYPE_NAMES, Spec

__all__ = ["parse"]

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SPEC = re.compile(r"\s*(\w+)\s*\[(.*?)\]\s*(?:\{(.*)\})?\s*\Z", re.DOTALL)
_DIM = re.compile(r"(\d+)(?:@(?:(\w+)|\(([\w\s,]*)\))(?::(chunk|\d+(?:\s*\+\s*\d+)*))?)?\Z")
_DIM_FORM = "a dim reads size, size@axis or size@(major,minor), then :chunk or :3+5"
_FORM = "dtype[size@axis,size@(major,minor):chunk,size]{unreduced: axis, axis=max; reduced: axis}"


def parse(text: str, mesh: Mesh, /) -> Spec:
    """The spec that prints as `text` on `mesh`.

    Raises `ShardingError` that points at the part it cannot read.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> parse("f32[8@(dp,tp),16]", mesh).local_shape(0)
    (1, 16)
    >>> text = "bf16[6@dp:5+1,4]{unreduced: tp=max}"
    >>> str(parse(text, mesh)) == text
    True
    """
    match = _SPEC.match(text)
    if match is None:
        fail("fs.parse", repr(text), f"a spec reads {_FORM}", "'f32[8@dp,16]', say")
    name, body, states = match.groups()
    if name not in _DTYPES:
        fail("fs.parse", f"dtype {name!r} in {text!r}", f"dtypes are {', '.join(_DTYPES)}",
             did_you_mean(name, _DTYPES, "use one of them"))  # fmt: skip
    shape: list[int] = []
    entries: list[tuple[str, ...]] = []
    sizes: dict[int, tuple[int, ...]] = {}
    chunked: list[int] = []
    for dim, part in enumerate(_split_dims(body)):
        found = _DIM.match(part)
        if found is None:
            _refuse(text, part, _DIM_FORM)
        size, one, several, cut = found.groups()
        shape.append(int(size))
        entries.append((one,) if one else tuple((several or "").replace(",", " ").split()))
        if cut == "chunk":
            chunked.append(dim)
        elif cut:
            sizes[dim] = tuple(int(n) for n in cut.split("+"))
    kinds = _states(text, states or "")
    partition = PartitionSpec(*entries, unreduced=kinds["unreduced"], reduced=kinds["reduced"])
    # Only the dims marked `:chunk` may be uneven: the others are checked without the option.
    free = PartitionSpec(*(() if d in chunked else e for d, e in enumerate(entries)))
    Spec(mesh, free, shape=shape, dtype=_DTYPES[name], sizes=sizes)
    return Spec(mesh, partition, shape=shape, dtype=_DTYPES[name], sizes=sizes,
                uneven="chunk" if chunked else None)  # fmt: skip


def _split_dims(body: str) -> list[str]:
    """The comma-separated dims, commas in parentheses aside."""
    if not body.strip():
        return []
    return [part.strip() for part in re.split(r",(?![^(]*\))", body)]


def _states(text: str, states: str) -> dict[str, dict[str, str]]:
    kinds: dict[str, dict[str, str]] = {"unreduced": {}, "reduced": {}}
    for part in filter(None, (each.strip() for each in states.split(";"))):
        word, colon, axes = part.partition(":")
        if not colon or word.strip() not in kinds:
            _refuse(text, part, "a state reads 'unreduced: axes' or 'reduced: axes'")
        for item in axes.split(","):
            axis, equals, kind = (each.strip() for each in item.partition("="))
            if not axis.isidentifier() or (equals and kind not in REDUCTIONS):
                _refuse(text, item, f"an axis reads axis or axis=one of {', '.join(REDUCTIONS)}")
            if axis in kinds[word.strip()]:
                _refuse(text, item, "an axis is named once")
            kinds[word.strip()][axis] = kind or "sum"
    return kinds


def _refuse(text: str, part: str, rule: str) -> NoReturn:
    at = max(text.find(part), 0)
    fail("fs.parse", f"{text}\n         {' ' * at}{'^' * max(len(part), 1)}", rule,
         f"the whole form is {_FORM}")  # fmt: skip
