"""fshard: functional sharding on PyTorch. Layouts and programs of collectives as values."""

from importlib.metadata import PackageNotFoundError, version

from fshard import interop as _interop  # noqa: F401 - registers what Spec.placements asks for
from fshard.errors import ShardingError
from fshard.mesh import Mesh
from fshard.ops.apply import apply
from fshard.ops.auto import auto
from fshard.ops.partition import partition
from fshard.ops.propagate import propagate
from fshard.ops.registry import register_decomposition, register_rule
from fshard.ops.rule import rule
from fshard.ops.trace import constrain
from fshard.partition_spec import PartitionSpec
from fshard.plan.batch import Batch
from fshard.plan.redistribute import redistribute
from fshard.program import rewrite as _rewrite  # noqa: F401 - registers Program.simplify
from fshard.program.bounds import Bound, lower_bound
from fshard.program.cost import Cost
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
)
from fshard.program.topology import Link, Topology
from fshard.run import trees as _trees  # noqa: F401 - registers what a Batch's call asks for
from fshard.run.calibrate import calibrate
from fshard.run.distributed import init
from fshard.run.execute import Pending
from fshard.run.moving import from_local, reshard, scatter, shard, unshard
from fshard.run.simulate import simulate
from fshard.show.comm_log import comm_log
from fshard.show.layout import visualize
from fshard.spec import Sharded, Spec
from fshard.spmd.asynchronous import start
from fshard.spmd.movements import all_gather, all_to_all, psum_scatter, pswapaxes
from fshard.spmd.permutations import pbroadcast, ppermute, pshuffle
from fshard.spmd.places import axis_index, axis_size, pcast
from fshard.spmd.ragged import ragged_all_to_all
from fshard.spmd.reductions import pargmax, pargmin, pmax, pmean, pmin, pprod, psum
from fshard.spmd.shard_map import local_map, shard_map
from fshard.spmd.smap import smap
from fshard.spmd.tracking import typeof
from fshard.state import random
from fshard.text import parse

P = PartitionSpec

__all__ = [
    "AllGather",
    "AllReduce",
    "AllSlice",
    "AllToAll",
    "Batch",
    "Bound",
    "Cast",
    "CollectivePermute",
    "Cost",
    "Exchange",
    "InvariantToReduced",
    "Link",
    "Mesh",
    "P",
    "PartitionSpec",
    "Pending",
    "Program",
    "ReduceScatter",
    "ReducedToInvariant",
    "Remesh",
    "ReplicatedToUnreduced",
    "Sharded",
    "ShardedToUnreduced",
    "ShardingError",
    "Spec",
    "Topology",
    "all_gather",
    "all_to_all",
    "apply",
    "auto",
    "axis_index",
    "axis_size",
    "calibrate",
    "comm_log",
    "constrain",
    "from_local",
    "init",
    "local_map",
    "lower_bound",
    "pargmax",
    "pargmin",
    "parse",
    "partition",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pprod",
    "propagate",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
    "random",
    "redistribute",
    "register_decomposition",
    "register_rule",
    "reshard",
    "rule",
    "scatter",
    "shard",
    "shard_map",
    "simulate",
    "smap",
    "start",
    "typeof",
    "unshard",
    "visualize",
]

try:
    __version__ = version("fshard")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
