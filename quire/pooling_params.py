"""The name of the parameters of embedding models, which this version does not have."""

from quire.engine.front.absent import PoolingParams

__all__ = ["PoolingParams"]
