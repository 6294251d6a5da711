import pytest

from rlsrl.data.version import INITIAL, Version


def test_a_later_attempt_is_newer_whatever_the_step() -> None:
    assert Version(2, 0) > Version(1, 10_000) > Version(1, 9_999) > INITIAL


def test_text_round_trip() -> None:
    assert Version.parse(str(Version(3, 1500))) == Version(3, 1500)


@pytest.mark.parametrize("text", ["", "3", "3.", ".3", "-1.2", "1.-2", "1.2.3", "a.b", "1,2", "¹.2"])
def test_other_texts_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"form <attempt>\.<step>"):
        Version.parse(text)
