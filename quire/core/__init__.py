"""The control plane: requests, scheduler, KV cache bookkeeping and the step plan.

It imports only the leaves (`quire.errors`, `quire.common`, `quire.config`): no torch, no numpy, no
asyncio, no wall clock, no global random numbers. The same code therefore runs in production, in
tests, in the simulator and in the capacity planner.
"""
