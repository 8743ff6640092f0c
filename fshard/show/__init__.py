"""Text, pictures and tables of values; importing it sets the hooks of their `explain` methods.

- `pictures`: `fs.visualize`, of layouts, meshes and programs
- `program_table`, `batch_table`, `partition_table`: `explain` of programs, batches and partitions
- `roofline_table`, `memory_table`: the time and the memory of a partitioned step
- `module_table`: the layouts of a distributed module
- `comm`: `fs.comm_log`, the collectives that ran
- `progress_bar`: bytes that `fs.state.save` has written
- `zero_stages`: bytes per rank of the stages of ZeRO
- `folding`: equal layers as one block of rows
- `table`: rows of text in plain text, rich and HTML
- `notebook`: HTML of values
"""

from fshard.show import memory_table as memory_table
from fshard.show import module_table as module_table
from fshard.show import notebook as notebook
from fshard.show import partition_table as partition_table
from fshard.show import progress_bar as progress_bar
from fshard.show import roofline_table as roofline_table
from fshard.show import zero_stages as zero_stages
from fshard.show.comm import comm_logging as comm_logging
