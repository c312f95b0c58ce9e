"""`quire bench`: the commands that measure. What they share is in `common`."""
