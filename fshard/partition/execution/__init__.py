"""Order and execution of the lines of a partitioned call.

- `schedule`: order of execution, with redistributions coalesced and launched ahead.
- `run_lines`: execution on one rank, and on all ranks of a simulation.
"""
