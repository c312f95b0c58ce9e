"""DeepSeek V3 and R1: V2's attention, and experts that are chosen by sigmoids and a bias
(arXiv:2412.19437)."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.deepseek import declare_deepseek
from quire.models.experts import RoutingDefaults, read_grouped_routing
from quire.program.operations import Routing

DEFAULTS = RoutingDefaults(experts=(256, 8), groups=(8, 4), factor=2.5)


def declare_deepseek_v3(config: ConfigReader) -> DecoderSpec:
    """Declare a decoder; all layers have mixtures but the first `first_k_dense_replace`."""
    return declare_deepseek(
        config,
        _routing,
        default_dense=3,
        has_choice_bias=True,
        is_interleaved=config.flag("rope_interleave", True),
    )


def _routing(config: ConfigReader) -> Routing:
    return read_grouped_routing(config, "sigmoid", DEFAULTS)
