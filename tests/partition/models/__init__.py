"""Models of other packages, partitioned unchanged: `python -m tests.partition.models.table`."""
