"""Random layouts, mapped bodies and partitioned functions, compared with one device.

`python -m tests.fuzz --seconds 600 --seed 1` runs cases of every kind for ten minutes and prints
the command that repeats each failure.
"""
