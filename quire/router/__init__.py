"""The router: one address in front of many OpenAI-compatible servers.

`policies` decides where a request goes and is pure, so that the simulator runs it as well; the rest
is HTTP around it.
"""
