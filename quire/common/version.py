"""Quire's version, for packages that may not import the package's own top."""

__version__ = "0.1.0"
