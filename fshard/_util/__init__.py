"""Text, errors, caches and hooks that all other folders use.

- `errors`: `ShardingError` and the builders of its messages.
- `hooks`: slots for functions of higher folders.
- `notebook_view`: values that notebooks show as HTML.
- `tracebacks`: errors without the library's frames.
- `signatures`: errors of calls that do not match a signature.
- `code_names`: names of globals that code reads.
- `dtypes`: floating-point and complex dtypes.
- `other_names`: names of other packages, for errors of missing names.
- `cache`: the size limit of all caches.
- `public`: signatures of public functions in `help()`.
- `text`: widths, units, lists of words.
"""
