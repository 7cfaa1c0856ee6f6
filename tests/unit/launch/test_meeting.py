"""The address of the first host: the first one that all others reach and that answers with its token."""

from weft.core.network import is_loopback, own_addresses
from weft.launch.meeting import MeetingPoint, addresses_to_offer, choose_address, reach


def test_only_an_address_that_answers_with_the_token_is_reached() -> None:
    listener, other = MeetingPoint(), MeetingPoint()
    try:
        assert reach(["127.0.0.1"], port=listener.port, token=listener.token) == {"127.0.0.1": "127.0.0.1"}
        assert reach(["127.0.0.1"], port=other.port, token=listener.token) == {}
    finally:
        listener.close()
        other.close()


def test_loopback_is_offered_last() -> None:
    offered = list(addresses_to_offer())
    assert offered == sorted(offered, key=is_loopback)
    assert own_addresses()["127.0.0.1"] == "lo"


def test_the_chosen_address_is_reached_by_all() -> None:
    offered = ["10.0.0.1", "10.1.0.1", "127.0.0.1"]
    reached = {"b": {"10.0.0.1": "eth0", "10.1.0.1": "ib0"}, "c": {"10.1.0.1": "ib0"}}
    assert choose_address(offered, reached) == "10.1.0.1"
    assert choose_address(offered, {**reached, "d": {}}) is None
