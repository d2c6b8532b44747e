"""Each route is logged once, and the last one is known."""

import logging

from cake.core.routes import Routes


def test_each_route_is_logged_once_and_the_last_is_known(caplog):
    routes: Routes[str] = Routes("toy")
    assert routes.last() is None
    with caplog.at_level(logging.INFO, logger="cake"):
        for route in ("a", "a", "b", "a"):
            routes.note(route)
    assert [record.getMessage() for record in caplog.records] == ["toy runs: a", "toy runs: b"]
    assert routes.last() == "a"
