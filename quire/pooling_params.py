"""The parameters of pooling models, under the module name that vLLM has for them."""

from quire.core.pooling import PoolingParams

__all__ = ["PoolingParams"]
