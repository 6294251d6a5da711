import pytest

from rlsrl.rpc.settings import validate_address


@pytest.mark.parametrize(
    "address", ["unix-abstract:rlsrl-1-coordinator", "127.0.0.1:4711", "[::1]:0", "pod-0.svc:50051"]
)
def test_both_forms_are_accepted(address: str) -> None:
    assert validate_address(address) == address


@pytest.mark.parametrize(
    "address", ["", "coordinator", "unix-abstract:", "unix:/tmp/x", "unix:7", ":4711", "host:", "host:70000", "host:x1"]
)
def test_anything_else_is_refused_by_name(address: str) -> None:
    with pytest.raises(ValueError, match="neither unix-abstract:NAME nor HOST:PORT"):
        validate_address(address)
