"""Pictures, tables and logs; importing it registers what values ask for to show themselves."""

from fshard.show import notebook as notebook
from fshard.show import partition_table as partition_table
