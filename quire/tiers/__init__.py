"""Tiers below the pool of KV blocks: host memory, and a folder that outlives the process."""
