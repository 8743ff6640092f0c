"""Switch of the environment: `FSHARD_THOROUGH=1` triples random cases, doubles layouts of rules."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("FSHARD_THOROUGH") == "1"
