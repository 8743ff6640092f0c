"""Text, errors and hooks that every other room uses.

errors   `ShardingError` and the builders of its messages
hooks    slots for functions of higher rooms
public   signatures of public functions in `help()`
text     widths, units, lists of words
"""
