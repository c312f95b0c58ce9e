"""Certificates of two authorities, for a hundred years: each signs for its own engine alone. They protect nothing."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "ours.ca.pem": """\
-----BEGIN CERTIFICATE-----
MIIBdDCCARugAwIBAgIUfv2O/9YrHLGsDBMl9Kw8RFGqjDkwCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEb3VyczAgFw0yNjExMjQxNjM0NDJaGA8yMTI2MTAzMTE2MzQ0
MlowDzENMAsGA1UEAwwEb3VyczBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABOsX
DS19PXtTC/yVkCVXbxEcLXLH7ogeiMTQ01KmUeW04+TXJdp7XdXAID1kYdOzlwRb
mgX/xppo0t4XmcFx7VujUzBRMB0GA1UdDgQWBBQnISMLxal5S2O8cJA5xfjSAhzH
1TAfBgNVHSMEGDAWgBQnISMLxal5S2O8cJA5xfjSAhzH1TAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0cAMEQCIAWiaKL6OP+MAhT2YsSi81H6j4AT/077y0OR
ePrSDWVJAiATS/MG41CBSToOo8/AR7634emsbCVXdBjPWoD77EfAew==
-----END CERTIFICATE-----
""",
    "ours.pem": """\
-----BEGIN CERTIFICATE-----
MIIBHDCBwwIUR1JbaOC081iM6eURW6rmYSsjoV8wCgYIKoZIzj0EAwIwDzENMAsG
A1UEAwwEb3VyczAgFw0yNjExMjQxNjM0NDJaGA8yMTI2MTAzMTE2MzQ0MlowETEP
MA0GA1UEAwwGZW5naW5lMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEUn6zCWI+
bIdx19pHoFBBoOxH094ixWNC+CJ8guZRkAJGzFUKFeoX+iZPkwDUbIXpiTl4mymw
hjZ/xmtylAV3aTAKBggqhkjOPQQDAgNIADBFAiB/+cYoQukN1QC0iTJBSp/gWEQ2
aWoJ8PjmdcwcWFRJ5gIhAJDcWzUdt/V5EN22XknShEC+tcQnSChngpwwDNxVc7aY
-----END CERTIFICATE-----
""",
    "ours.key": """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg5lfkccK5xlkalX0s
lZjhDsUe5575cErsxI9nNdHpHXWhRANCAARSfrMJYj5sh3HX2kegUEGg7EfT3iLF
Y0L4InyC5lGQAkbMVQoV6hf6Jk+TANRshemJOXibKbCGNn/Ga3KUBXdp
-----END PRIVATE KEY-----
""",
    "others.ca.pem": """\
-----BEGIN CERTIFICATE-----
MIIBeTCCAR+gAwIBAgIUeRf9gsJNl2GGz8++r0m42Knan7IwCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGb3RoZXJzMCAXDTI2MTEyNDE2MzQ0MloYDzIxMjYxMDMxMTYz
NDQyWjARMQ8wDQYDVQQDDAZvdGhlcnMwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AARxpdzlFokn9TbiVqFWS7PnHdE9pMmtOUGey2pv3lNn+SeeieiGacTlZkXwHLA9
m8sjLk2vFfWQZIcH5gyvZFNTo1MwUTAdBgNVHQ4EFgQUip1KMAk3d8G+fcMK9iNI
E4pcB5cwHwYDVR0jBBgwFoAUip1KMAk3d8G+fcMK9iNIE4pcB5cwDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiEArLYo97UzYE2N7ytnjtQdCPNYEE5B
ahzJstFAPuDWMnQCIHwWZ1eLjnR+JbKX5LAcIn3REAK5Pc7DoiydoVBHleSx
-----END CERTIFICATE-----
""",
    "others.pem": """\
-----BEGIN CERTIFICATE-----
MIIBHjCBxQIUBeKYcSvYzi9foOUdgIxjXc71qV0wCgYIKoZIzj0EAwIwETEPMA0G
A1UEAwwGb3RoZXJzMCAXDTI2MTEyNDE2MzQ0MloYDzIxMjYxMDMxMTYzNDQyWjAR
MQ8wDQYDVQQDDAZlbmdpbmUwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAR41pCW
hLLfUT57IFwPNuduUMNr6ogVP2LEZt97ro3uAlqWxsJf5eQOcjsviCO9AOk9ZB93
ksQSZNyKafEz+AqaMAoGCCqGSM49BAMCA0gAMEUCIG38VGV2TZz2Vz4/41lMeYkq
5JwdjBkymDHZKCrg5rZoAiEA3ENRtYZw4RtxEpo49F9R7b7KsLO85dgM70E2ndXT
X88=
-----END CERTIFICATE-----
""",
    "others.key": """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgb03UZAJxLPdiwsq/
yzjWOLq0fiIXmo9Ozq2G9lySr7qhRANCAAR41pCWhLLfUT57IFwPNuduUMNr6ogV
P2LEZt97ro3uAlqWxsJf5eQOcjsviCO9AOk9ZB93ksQSZNyKafEz+Aqa
-----END PRIVATE KEY-----
""",
}


def write_certificates(folder: Path, name: str = "ours") -> dict[str, str]:
    """Write the files of "ours" or "others"; returns their paths by the names of options."""
    for file in (f"{name}.pem", f"{name}.key", f"{name}.ca.pem"):
        (folder / file).write_text(FILES[file])
    return {
        "ssl_certfile": str(folder / f"{name}.pem"),
        "ssl_keyfile": str(folder / f"{name}.key"),
        "ssl_ca_file": str(folder / f"{name}.ca.pem"),
    }
