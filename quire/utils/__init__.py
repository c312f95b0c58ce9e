"""Small helpers of scripts' command lines."""

from quire.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
