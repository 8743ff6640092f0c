"""`Exchange` and `Remesh`: texts of programs, errors and their fixes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.refinement import prime_refinement
from fshard.program.infer import infer
from fshard.program.program import Program
from fshard.program.steps import (
    AllToAll,
    CollectivePermute,
    Exchange,
    ReducedToInvariant,
    Remesh,
    ReplicatedToUnreduced,
    Step,
)
from tests.helpers import spec_grid
from tests.helpers.spec_grid import exchange, may_exchange

# -- text ---------------------------------------------------------------------------------


def test_text_of_programs_on_several_meshes() -> None:
    src = parse("f32[1024@dp,512@tp]", Mesh(dp=2, tp=4))
    fine = prime_refinement(src.mesh)
    step = Exchange(P(None, "tp"), mesh=Mesh({"tp": 4}, devices=range(8, 12)))
    lines = [
        "f32[1024@dp,512@tp] on Mesh(dp=2, tp=4) -> f32[1024,512@tp]",
        "    on Mesh(tp=4, devices=range(8, 12))",
        "  exchange(P(None, 'tp'), Mesh(tp=4, devices=range(8, 12)))",
        "    f32[1024,512@tp]  262,144 B",
    ]
    assert str(Program(src, (step,))).splitlines() == lines
    steps = (Remesh(fine.mesh, fine.refine(src.partition)), AllToAll("tp_1", 1, 0))
    lines = [
        "f32[1024@dp,512@tp] on Mesh(dp=2, tp=4) -> f32[1024@(dp,tp_1),512@tp_0]",
        "    on Mesh(dp=2, tp_0=2, tp_1=2)",
        "  remesh(Mesh(dp=2, tp_0=2, tp_1=2))  f32[1024@dp,512@(tp_0,tp_1)]        0 B",
        "  all_to_all(tp_1, dim 1 -> 0)        f32[1024@(dp,tp_1),512@tp_0]  131,072 B",
    ]
    assert str(Program(src, steps)).splitlines() == lines
    assert max(map(len, lines)) <= 80


def test_explanations_name_both_meshes() -> None:
    src = parse("f32[8@x]", Mesh(x=2))
    text = str(Program(src, (Exchange(P("y"), mesh=Mesh(y=4)),)).explain())
    first = "f32[8@x] on Mesh(x=2) -> f32[8@y] on Mesh(y=4), topology node"
    assert text.splitlines()[0] == first


def test_errors_name_meshes_that_differ() -> None:
    """Errors name the meshes of two specs that differ in them alone."""
    one, other = (parse("f32[8@x]", Mesh({"x": 2}, devices=d)) for d in ((0, 1), (2, 3)))
    with pytest.raises(ShardingError) as caught:
        _ = Program(one, ()) >> Program(other, ())
    first, second = "f32[8@x] on Mesh(x=2)", "f32[8@x] on Mesh(x=2, devices=range(2, 4))"
    assert str(caught.value) == spec_grid.message(
        "Program.then", f"a program to {first}, then one from {second}",
        "the second must begin with the spec that the first ends with",
        f"fs.redistribute({first}, {second}) between them")  # fmt: skip
    with pytest.raises(ShardingError) as caught:
        Program(one, (), other)
    assert str(caught.value) == spec_grid.message(
        "Program", f"steps that lead from f32[8@x] to {first}",
        f"they must lead to the target, {second}", "leave dst out, or plan with fs.redistribute",
    )  # fmt: skip


# -- refusals -----------------------------------------------------------------------------

XY, FINE = Mesh(x=2, y=4), Mesh(x=2, y_0=2, y_1=2)
ADDENDS = "an axis must be sharded, or unreduced by the same reduction, before it is left unreduced"
STAYS = "a reduced axis must stay so in an exchange, by the same reduction, or become sharded"
STAY = "every rank must stay unreduced and reduced with the same ranks"
PLAN = "fs.redistribute(src, dst) plans the steps"

# step, source, then the error: where, given, rule, fix
REFUSED: list[tuple[Step, str, tuple[str, str, str, str]]] = [
    (Exchange(P("x", unreduced={"y"})), "f32[8]",
     ("exchange(P('x', unreduced={'y'})) on f32[8]", "'y' unreduced in f32[8@x]{unreduced: y}",
      ADDENDS, "leave 'y' out, then fs.ReplicatedToUnreduced('y')")),
    (Exchange(P("x", unreduced={"y": "max"})), "f32[8]{unreduced: y}",
     ("exchange(P('x', unreduced={'y': 'max'})) on f32[8]{unreduced: y}",
      "'y' unreduced by max in f32[8@x]{unreduced: y=max}", ADDENDS,
      "leave 'y' out, then fs.ReplicatedToUnreduced('y', 'max')")),
    (Exchange(P("x")), "f32[8]{reduced: y}",
     ("exchange(P('x')) on f32[8]{reduced: y}", "'y' reduced in f32[8]{reduced: y}", STAYS,
      "fs.ReducedToInvariant('y') first")),
    (Exchange(P("x", reduced={"y"})), "f32[8]{reduced: y=avg}",
     ("exchange(P('x', reduced={'y'})) on f32[8]{reduced: y=avg}",
      "'y' reduced by avg in f32[8]{reduced: y=avg}", STAYS, "fs.ReducedToInvariant('y') first")),
    (Exchange(P("a"), mesh=Mesh(a=4)), "f32[8]{reduced: y}",
     ("exchange(P('a'), Mesh(a=4)) on f32[8]{reduced: y}",
      "'y' reduced in f32[8]{reduced: y} on Mesh(x=2, y=4)",
      "a spec must not be reduced where the mesh changes", "fs.ReducedToInvariant('y') first")),
    (Exchange(P(unreduced={"a"}), mesh=Mesh(a=4)), "f32[8]{unreduced: y}",
     ("exchange(P(unreduced={'a'}), Mesh(a=4)) on f32[8]{unreduced: y}",
      "'a' unreduced in f32[8]{unreduced: a} on Mesh(a=4)",
      "a spec on another mesh must not be unreduced: partial sums are reduced on the way",
      "leave 'a' out, then fs.ReplicatedToUnreduced('a')")),
    (Exchange(P(None, "a"), mesh=Mesh(a=3)), "f32[8,8]",
     ("exchange(P(None, 'a'), Mesh(a=3)) on f32[8,8]", "dim 1 of size 8 over ('a',)",
      "it has 3 shards; without sizes they must be equal: 8 % 3 = 2",
      "sizes=(None, (3, 3, 2)), say")),
    (Exchange(P("x"), ((1, 2),)), "f32[8]",
     ("exchange(P('x')) on f32[8]", "dim 0 of size 8 over ('x',)",
      "it has 2 shards; 2 sizes of at least 0 that sum to 8, not 2 that sum to 3",
      "sizes=((4, 4),), say")),
    (Exchange(P("x"), (None, (1, 7))), "f32[8]",
     ("exchange(P('x')) on f32[8]", "sizes=(None, (1, 7))",
       "sizes must have at most one entry per dim: 2 > 1",
      "sizes=(None,)")),
    (Exchange(P("x", "y")), "f32[8]",
     ("exchange(P('x', 'y'))", "f32[8] on Mesh(x=2, y=4)",
      "a partition must have at most one entry per dim: 2 > 1",
      "leave out the entries of dims that it does not have")),
    (Exchange(P("z")), "f32[8]",
     ("exchange(P('z')) on f32[8]", "axis 'z' on Mesh(x=2, y=4)", "an axis must be one of x, y",
      "use one of x, y")),
    (Exchange(P("x", reduced={"y": "avg"})), "i64[8]",
     ("exchange(P('x', reduced={'y': 'avg'})) on i64[8]", "'y' averaged, dtype torch.int64",
      "an average of integers is not an integer", "use sum, or a floating dtype")),
    (Remesh(FINE, P("x")), "f32[8@y]",
     ("remesh(Mesh(x=2, y_0=2, y_1=2))", "f32[8@y] on Mesh(x=2, y=4)",
      "dim 0 must keep its 4 shards: ('x',) make 2", PLAN)),
    (Remesh(FINE, P(("y_1", "y_0"))), "f32[8@y]",
     ("remesh(Mesh(x=2, y_0=2, y_1=2))", "f32[8@y] on Mesh(x=2, y=4)",
      "every rank must keep its shard: rank 1 has [2:4], in f32[8@(y_1,y_0)] [4:6]", PLAN)),
    (Remesh(Mesh(x=2), P("x")), "f32[8@x]",
     ("remesh(Mesh(x=2))", "f32[8@x] on Mesh(x=2, y=4)",
      "both meshes must have the same devices: Mesh(x=2) has other ones",
      f"fs.Exchange goes to other devices; {PLAN}")),
    (Remesh(FINE, P(unreduced={"y_0"})), "f32[8]{unreduced: y}",
     ("remesh(Mesh(x=2, y_0=2, y_1=2))", "f32[8]{unreduced: y} on Mesh(x=2, y=4)",
      f"{STAY}: in f32[8]{{unreduced: y_0}} with others", PLAN)),
    (Remesh(FINE, P("z")), "f32[8]",
     ("remesh(Mesh(x=2, y_0=2, y_1=2)) on f32[8]", "axis 'z' on Mesh(x=2, y_0=2, y_1=2)",
      "an axis must be one of x, y_0, y_1", "use one of x, y_0, y_1")),
    (Remesh(FINE, P(None, "x")), "f32[8@x]",
     ("remesh(Mesh(x=2, y_0=2, y_1=2))", "f32[8@x] on Mesh(x=2, y=4)",
      "a partition must have at most one entry per dim: 2 > 1",
      "leave out the entries of dims that it does not have")),
    (AllToAll("x", 0, 1, also=(AllToAll("x", 1, 0),)), "f32[8@x,8@y]",
     ("all_to_all(x, dim 0 -> 1; x, dim 1 -> 0) on f32[8@x,8@y]",
      "axis 'x' 2 times in ('x', 'x')", "an axis must be named at most once", "name 'x' once")),
    (AllToAll("x", 0, 0, also=(AllToAll("y", 1, 1),)), "f32[8@x,8@y]",
     ("all_to_all(x, dim 0 -> 0; y, dim 1 -> 1)", "f32[8@x,8@y] on Mesh(x=2, y=4)",
      "the two dims must differ", "collective_permute reorders one dim")),
    (AllToAll("x", 0, 1, also=(AllToAll("y", 0, 1),)), "f32[8@(y,x),8]",
     ("all_to_all(y, dim 0 -> 1)", "f32[8@(y,x),8] on Mesh(x=2, y=4)",
      "the axes must be the most minor of dim 0, which has ('y', 'x')", "end with ('x',)")),
]  # fmt: skip


@pytest.mark.parametrize(("step", "src", "says"), REFUSED, ids=lambda case: str(case)[:60])
def test_invalid_exchanges_are_refused(
    step: Step, src: str, says: tuple[str, str, str, str]
) -> None:
    with pytest.raises(ShardingError) as caught:
        infer(step, parse(src, XY))
    assert str(caught.value) == spec_grid.message(*says)


def test_error_lists_all_problems() -> None:
    step = Exchange(P("y", unreduced={"x"}))
    with pytest.raises(ShardingError) as caught:
        infer(step, parse("f32[8]{reduced: x}", XY))
    first = spec_grid.message(
        "exchange(P('y', unreduced={'x'})) on f32[8]{reduced: x}",
        "'x' reduced in f32[8]{reduced: x}", STAYS, "fs.ReducedToInvariant('x') first")  # fmt: skip
    second = spec_grid.message(
        "", "'x' unreduced in f32[8@y]{unreduced: x}", ADDENDS,
        "leave 'x' out, then fs.ReplicatedToUnreduced('x')")  # fmt: skip
    assert str(caught.value) == f"{first}\n{second}"


def test_infer_accepts_exactly_the_allowed_exchanges() -> None:
    """On all pairs, `infer` accepts an exchange exactly if the rule does."""
    for one, other in [(XY, XY), (XY, Mesh(x=8)), (Mesh(x=8), XY)]:
        for src in spec_grid.all_specs(one, (8,)):
            for dst in spec_grid.all_specs(other, (8,)):
                if may_exchange(src, dst):
                    assert infer(exchange(src, dst), src) == dst
                    continue
                with pytest.raises(ShardingError):
                    infer(exchange(src, dst), src)


def test_fixes_of_errors_work() -> None:
    src = parse("f32[8]{reduced: y}", XY)
    steps = (ReducedToInvariant("y"), Exchange(P("x")), ReplicatedToUnreduced("y", "max"))
    assert Program(src, steps).dst == parse("f32[8@x]{unreduced: y=max}", XY)
    sized = Exchange(P(None, "a"), (None, (3, 3, 2)), Mesh(a=3))
    assert Program(parse("f32[8,8]", XY), (sized,)).dst == parse("f32[8,8@a:chunk]", Mesh(a=3))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Exchange("x"), ("fs.Exchange", "partition 'x'", "partition must be a P",
                                 "P('x', None), say: one entry per dim")),
        (lambda: CollectivePermute(("x",)),
         ("fs.CollectivePermute", "partition ('x',)", "partition must be a P",
          "P('x', None), say: one entry per dim")),
        (lambda: Exchange(P("x"), (3, 5)),
         ("fs.Exchange", "sizes=(3, 5)",
          "sizes must be None or a tuple of one integer per shard, for every dim",
          "sizes=((3, 5), None), say, or None where all are equal")),
        (lambda: Exchange(P("x"), mesh={"x": 2}),
         ("fs.Exchange", "mesh {'x': 2}", "mesh must be a Mesh", "fs.Mesh(dp=2, tp=4), say")),
        (lambda: Remesh(P("x"), Mesh(x=2)),
         ("fs.Remesh", "mesh P('x')", "mesh must be a Mesh", "fs.Mesh(dp=2, tp=4), say")),
        (lambda: AllToAll("x", 0, 1, also="y"),
         ("fs.AllToAll", "also='y'", "also must be AllToAll steps without `also`",
          "also=(fs.AllToAll('y', 0, 1), fs.AllToAll('z', 0, 1)), side by side")),
    ],
)  # fmt: skip
def test_refusals_of_other_types(make: Callable[[], Step], says: tuple[str, str, str, str]) -> None:
    with pytest.raises(ShardingError) as caught:
        make()
    assert str(caught.value) == spec_grid.message(*says)
