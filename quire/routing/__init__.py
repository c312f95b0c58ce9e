"""Where a request goes: decisions without a socket, a clock or a thread of their own.

Imports the standard library alone. The router calls it with what it knows of an HTTP body, a front
of several replicas with a request's tokens, the fleet simulator with what it knows of a trace;
times are passed in.
"""
