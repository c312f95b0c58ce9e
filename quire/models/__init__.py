"""Decoder families as declarations: what a `config.json` says, as plain frozen records.
Imports no torch."""
