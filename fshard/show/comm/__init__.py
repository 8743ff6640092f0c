"""Collectives that ran: counts, their origin, and comparisons with expected counts.

- `comm_log`: `fs.comm_log` and `CommLog`
- `phase`: counters of launches
- `origin`: the call, module and source line of a collective
- `expected_counts`: tables of expected and counted launches
- `comm_logging`: the logger `fshard.comm`, and `FSHARD_LOGS`
"""
