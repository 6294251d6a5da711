from __future__ import annotations

import pytest

from rlsrl.api.quantities import amount_of


@pytest.mark.parametrize(
    ("quantity", "amount"),
    [
        ("512Mi", 512 * 1024**2),
        ("1.5Gi", 3 * 1024**3 // 2),
        ("20G", 20 * 10**9),
        ("5e3", 5000),
        ("2E", 2 * 10**18),
        ("2E1", 20),
        ("1k", 1000),
        ("1500m", 1),
        (4096, 4096),
        ("", None),
        ("1Kib", None),
        ("ten", None),
        (None, None),
    ],
)
def test_quantities(quantity: object, amount: int | None) -> None:
    assert amount_of(quantity) == amount
