"""The processes of ranks 1 and above: what starts them, and what they are."""

import sys

RANK_COMMAND = (sys.executable, "-P", "-m", "quire.engine.ranks")
