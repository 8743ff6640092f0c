"""`parse`, the inverse of `str(spec)`."""

from __future__ import annotations

import re
from typing import NoReturn

from fshard._util.errors import did_you_mean, fail
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import REDUCTIONS, PartitionSpec
from fshard.layout.spec import DTYPE_NAMES, Spec

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SPEC = re.compile(r"\s*(\w+)\s*\[(.*?)\]\s*(?:\{(.*)\})?\s*\Z", re.DOTALL)
_DIM = re.compile(r"(\d+)(?:@(?:(\w+)|\(([\w\s,]*)\))(?::(chunk|\d+(?:\s*\+\s*\d+)*))?)?\Z")
_DIM_FORM = "a dim must read size, size@axis or size@(major,minor), then :chunk or :3+5"
_FORM = "dtype[size@axis,size@(major,minor):chunk,size]{unreduced: axis, axis=max; reduced: axis}"


def parse(text: str, mesh: Mesh, /) -> Spec:
    """Return the spec whose text on a mesh is `text`.

    Args:
        text: `dtype[size@axis,size@(major,minor):chunk]{unreduced: axis, axis=max; reduced: axis}`.
        mesh: mesh whose axes the text names.

    Returns:
        The spec; `str(parse(text, mesh))` is the canonical form of `text`.

    Raises:
        ShardingError: the text has another form, and the message points at the part; or the layout
            is not valid on the mesh.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=4)
    >>> fs.parse("f32[8@(dp,tp),16]", mesh).local_shape(0)
    (1, 16)
    >>> fs.parse("bf16[6@dp:5+1,4]{unreduced: tp=max}", mesh)
    bf16[6@dp:5+1,4]{unreduced: tp=max}
    """
    match = _SPEC.match(text) if isinstance(text, str) else None
    if match is None:
        fail("fs.parse", repr(text), f"a spec must read {_FORM}", "'f32[8@dp,16]', say")
    name, body, states = match.groups()
    if name not in _DTYPES:
        fail("fs.parse", f"dtype {name!r} in {text!r}",
             f"a dtype must be one of {', '.join(_DTYPES)}",
             did_you_mean(name, _DTYPES, "use one of them"))  # fmt: skip
    shape: list[int] = []
    entries: list[tuple[str, ...]] = []
    sizes: dict[int, tuple[int, ...]] = {}
    chunked: list[int] = []
    for dim, part in enumerate(_split_dims(body)):
        match = _DIM.match(part)
        if match is None:
            _refuse(text, part, _DIM_FORM)
        size, axis, axes, ending = match.groups()
        shape.append(int(size))
        entries.append((axis,) if axis else tuple((axes or "").replace(",", " ").split()))
        if ending == "chunk":
            chunked.append(dim)
        elif ending:
            sizes[dim] = tuple(int(n) for n in ending.split("+"))
    kinds = _states(text, states or "")
    partition = PartitionSpec(*entries, unreduced=kinds["unreduced"], reduced=kinds["reduced"])
    # Only dims marked `:chunk` may be uneven: the others are checked without the option.
    unmarked = PartitionSpec(*(() if dim in chunked else axes for dim, axes in enumerate(entries)))
    Spec(mesh, unmarked, shape=shape, dtype=_DTYPES[name], sizes=sizes)
    return Spec(mesh, partition, shape=shape, dtype=_DTYPES[name], sizes=sizes,
                uneven="chunk" if chunked else None)  # fmt: skip


def _split_dims(body: str) -> list[str]:
    """Split the text of dims at commas outside of parentheses."""
    if not body.strip():
        return []
    return [part.strip() for part in re.split(r",(?![^(]*\))", body)]


def _states(text: str, states: str) -> dict[str, dict[str, str]]:
    """Return `{"unreduced": {axis: reduction}, "reduced": ...}` of the text in braces."""
    kinds: dict[str, dict[str, str]] = {"unreduced": {}, "reduced": {}}
    for part in filter(None, (item.strip() for item in states.split(";"))):
        word, colon, axes = part.partition(":")
        if not colon or word.strip() not in kinds:
            _refuse(text, part, "a state must read 'unreduced: axes' or 'reduced: axes'")
        for item in axes.split(","):
            axis, equals, kind = (text.strip() for text in item.partition("="))
            if not axis.isidentifier() or (equals and kind not in REDUCTIONS):
                _refuse(
                    text, item, f"an axis must read axis or axis=one of {', '.join(REDUCTIONS)}"
                )
            if axis in kinds[word.strip()]:
                _refuse(text, item, "an axis must be named once")
            kinds[word.strip()][axis] = kind or "sum"
    return kinds


def _refuse(text: str, part: str, rule: str) -> NoReturn:
    column = max(text.find(part), 0)
    fail("fs.parse", f"{text}\n         {' ' * column}{'^' * max(len(part), 1)}", rule,
         f"the whole form is {_FORM}")  # fmt: skip
