"""Pictures, tables and logs; importing it registers what values ask for to show themselves."""

from fshard.show import bundle as bundle
from fshard.show import functions as functions
