"""The forward pass as data: a flat list of operations that passes rewrite and back ends run.
Imports nothing but the leaves."""
