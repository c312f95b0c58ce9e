"""The name of the parameters of embedding models, which this version does not have."""

from __future__ import annotations

from quire.engine.absent import NO_POOLING, absent


class PoolingParams:
    """Not available in this version: making one raises NotAvailableError."""

    __init__ = absent("PoolingParams", NO_POOLING)
