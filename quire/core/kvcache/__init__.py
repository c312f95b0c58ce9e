"""Bookkeeping of the KV cache: which block holds what, who may read it, who may write it.
No tensors live here."""
