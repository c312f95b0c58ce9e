"""An engine in a process of its own: the messages, both ends, and the supervision that lets
requests outlive it.

`main` and `host` run in the engine's process and import torch when they build the model; everything
else is torch-free and runs in the server's process.
"""
