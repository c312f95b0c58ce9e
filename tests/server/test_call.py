"""What a call says of itself in headers can always be sent."""

from __future__ import annotations

import h11
from hypothesis import given
from hypothesis import strategies as st

from quire.server.http.call import Call
from quire.server.quota.tenants import EVERYBODY


@given(
    st.lists(
        st.text(max_size=300) | st.sampled_from(["", " ", ",", "a" * 2000]), min_size=1, max_size=40
    )
)
def test_names_that_clients_make_up_become_a_legal_header(names: list[str]) -> None:
    headers = Call("req_1", EVERYBODY, ignored_fields=names).response_headers()
    assert len(headers["x-quire-ignored-fields"]) <= 1024
    h11.Response(status_code=200, headers=list(headers.items()))
