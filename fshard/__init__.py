"""fshard: functional sharding on PyTorch. Layouts and programs of collectives as values.

These words have one meaning in the code and its documentation:

- axis, dim: an axis of the mesh, a dimension of a tensor.
- local: the part of a global tensor that one rank holds; in a simulation, a tuple of them.
- pair: a local and its spec.
- leaf: one tensor of a pytree.
- major, minor: of several axes of a dim, the first splits it first and is the most major.
- cotangent: the gradient of a value, on its way backward.
- dual: the spec of the cotangents of a spec; reduced and unreduced axes are swapped.
- factor: one loop of an operation, a letter of its rule.
- role: the use of one mesh axis by an operation, such as sharding one factor.
- strategy: a role for each mesh axis, and the layouts that follow.
- wire: one collective of one rank: its payload, its launch, and the result's unpacking.
- box: a product of intervals, one per dim: the elements that a rank holds, sends or receives.
- converted axis: one along which an exchange turns shards into unreduced values, or copies into
  shards.
- neutral element: the value that a reduction ignores, such as 0 in a sum.
- busiest rank: the rank that sends or receives the most bytes; it determines the time.
- launch: the start of a collective, which runs on while Python continues.
"""

from functools import partial as _partial
from importlib.metadata import PackageNotFoundError, version
from inspect import ismodule as _ismodule
from sys import modules as _modules

from fshard import domain, interop, random, state, testing
from fshard._torch.dynamo import run_uncompiled as _run_uncompiled
from fshard._util.errors import ShardingError
from fshard._util.other_names import MESH_NAMES as _MESH_NAMES
from fshard._util.other_names import OPTIMIZER_NAMES as _OPTIMIZER_NAMES
from fshard._util.other_names import refuse_attributes as _refuse_attributes
from fshard._util.other_names import refuse_name as _refuse_name
from fshard._util.public import publish as _publish
from fshard.interop.dtensor import from_dtensor, to_dtensor
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Mode, Rule, rule
from fshard.ops.propagate.propagate import propagate
from fshard.ops.sized import bincount, masked_select, nonzero, unique
from fshard.ops.strategy.strategy import Strategy
from fshard.ops.trace.trace import constrain
from fshard.partition.apply import apply, on_pairs
from fshard.partition.auto import Auto, auto
from fshard.partition.partition import Partition, partition
from fshard.partition.step_cost.memory_timeline import StepMemory
from fshard.partition.step_cost.roofline import Roofline
from fshard.plan.batch.batch import Batch
from fshard.plan.redistribute import redistribute
from fshard.program import simplify as _simplify  # noqa: F401 - sets the hook of Program.simplify
from fshard.program.cost.links import Link, Torus
from fshard.program.cost.model import Cost
from fshard.program.cost.topology import Topology
from fshard.program.lower_bound import Bound, lower_bound
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    HaloExchange,
    HaloReduce,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from fshard.run import execute_batch as _execute_batch  # noqa: F401 - sets the hook of Batch.__call__
from fshard.run.calibrate import calibrate
from fshard.run.execute import Pending
from fshard.run.from_local import from_local
from fshard.run.global_tensors import reshard, scatter, shard, unshard
from fshard.run.transports.simulator import simulate
from fshard.run.transports.torch_distributed import init
from fshard.show.comm.comm_log import CommLog, comm_log
from fshard.show.pictures.drawing import Picture
from fshard.show.pictures.visualize import visualize
from fshard.spmd.collectives.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from fshard.spmd.collectives.gather_scatter import all_gather, all_to_all, psum_scatter, pswapaxes
from fshard.spmd.collectives.pcast import axis_index, axis_size, pcast
from fshard.spmd.collectives.permutations import pbroadcast, ppermute, pshuffle
from fshard.spmd.collectives.psum import pargmax, pargmin, pmax, pmean, pmin, pprod, psum
from fshard.spmd.collectives.ragged_all_to_all import ragged_all_to_all
from fshard.spmd.collectives.start import start
from fshard.spmd.shard_map import local_map, shard_map
from fshard.spmd.smap import smap
from fshard.spmd.tracking.typed_body import typeof
from fshard.spmd.types import LocalType
from fshard.state.factories import (
    arange,
    empty,
    empty_like,
    eye,
    full,
    full_like,
    ones,
    ones_like,
    tril,
    triu,
    zeros,
    zeros_like,
)

P = PartitionSpec

__all__ = [
    "AllGather", "AllReduce", "AllSlice", "AllToAll", "Auto", "Batch", "Bound", "Cast",
    "CollectivePermute", "CommLog", "Cost", "Exchange", "HaloExchange", "HaloReduce",
    "InvariantToReduced", "Link", "LocalType", "Mesh", "Mode", "P", "Partition", "PartitionSpec",
    "Pending", "Picture", "Program", "ReduceScatter", "ReducedToInvariant", "Remesh",
    "ReplicatedToUnreduced", "Roofline", "Rule", "Sharded", "ShardedToUnreduced", "ShardingError",
    "Spec", "Step", "StepMemory", "Strategy", "Topology", "Torus", "all_gather",
    "all_gather_matmul", "all_to_all", "apply", "arange", "auto", "axis_index", "axis_size",
    "bincount", "calibrate", "comm_log", "constrain", "domain", "empty", "empty_like", "eye",
    "from_dtensor", "from_local", "full", "full_like", "init", "interop", "local_map",
    "lower_bound", "masked_select", "matmul_reduce_scatter", "nonzero", "on_pairs", "ones",
    "ones_like", "pargmax", "pargmin", "parse", "partition", "pbroadcast", "pcast", "pmax", "pmean",
    "pmin", "ppermute", "pprod", "propagate", "pshuffle", "psum", "psum_scatter", "pswapaxes",
    "ragged_all_to_all", "random", "redistribute", "register_decomposition", "register_rule",
    "reshard", "rule", "scatter", "shard", "shard_map", "simulate", "smap", "start", "state",
    "testing", "to_dtensor", "tril", "triu", "typeof", "unique", "unshard", "visualize", "zeros",
    "zeros_like",
]  # fmt: skip

try:
    __version__ = version("fshard")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

_publish(
    globals(),
    __all__,
    results={
        "Auto": "fs.auto",
        "CommLog": "fs.comm_log",
        "LocalType": "fs.typeof",
        "Partition": "fs.partition",
        "Pending": "fs.start",
        "Strategy": "fs.propagate",
    },
)
# `import fshard.partition.auto as m` reads the modules of the package from the function.
vars(partition).update(
    (name, item) for name, item in vars(_modules["fshard.partition"]).items() if _ismodule(item)
)
# Type checkers see no __getattr__, by which every name would be one of the package.
globals()["__getattr__"] = _partial(_refuse_name, known=__all__)
for _package in (domain, random, state, interop, testing):
    _publish(vars(_package), _package.__all__)
    _missing = _partial(_refuse_name, known=_package.__all__, package=_package.__name__)
    vars(_package)["__getattr__"] = _missing
_refuse_attributes(Mesh, _MESH_NAMES)
_refuse_attributes(state.Optimizer, _OPTIMIZER_NAMES)
_run_uncompiled(shard)  # the wrapper that all public functions have in common
_run_uncompiled(Spec.replace)  # the wrapper of methods with options
