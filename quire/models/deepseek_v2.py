"""DeepSeek V2 and V2 Lite: latent attention and mixtures of experts that weigh their shares of the
softmax (arXiv:2405.04434)."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.deepseek import declare_deepseek
from quire.models.experts import RoutingDefaults, read_grouped_routing
from quire.program.operations import Routing

DEFAULTS = RoutingDefaults(experts=(64, 6), groups=(1, 1), factor=1.0)


def declare_deepseek_v2(config: ConfigReader) -> DecoderSpec:
    """Declare a decoder; all layers have mixtures but the first `first_k_dense_replace`."""
    return declare_deepseek(
        config,
        _routing,
        default_dense=0,
        has_choice_bias=False,
        is_interleaved=True,
        has_mlp_bias=config.flag("mlp_bias", False),
    )


def _routing(config: ConfigReader) -> Routing:
    return read_grouped_routing(config, "softmax", DEFAULTS)
