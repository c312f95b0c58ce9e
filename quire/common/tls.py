"""Contexts of TLS for two ends that are alike: each shows a certificate, and takes those that one
authority has signed."""

from __future__ import annotations

import errno
import os
import ssl
from typing import NamedTuple


class TlsContexts(NamedTuple):
    """Of the end that listens, and of the one that connects."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def mutual_tls(certfile: str, keyfile: str | None, ca_file: str | None) -> TlsContexts:
    """Read the files. Raises OSError (`ssl.SSLError` is one) where they cannot be used."""
    for name in filter(None, (certfile, keyfile, ca_file)):
        if os.path.exists(name) and not os.path.isfile(name):  # a pipe would be waited for
            raise OSError(errno.EINVAL, "not a regular file", name)
    found = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Ends are known by who signed for them, not by names: addresses are found at run time.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certfile, keyfile)
        context.load_verify_locations(ca_file)
        found.append(context)
    return TlsContexts(*found)
