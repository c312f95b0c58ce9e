"""Grammars: what a row's output may look like, compiled once and followed token by token. The data
plane's half.

Owns the compiler (the library `llguidance`, imported when the first grammar comes) and the state of
each row. It knows plans and bytes of tokens; requests, texts and tensors are none of its business.
"""
