from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

from operator_world import ApiServer

from rlsrl.testing.documents import minimal
from rlsrl_operator.cluster import Cluster
from rlsrl_operator.informer_cache import InformerCache
from rlsrl_operator.testing import context_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_list_answers_until_the_end_of_its_pass_and_is_then_dropped() -> None:
    server, context = ApiServer(), context_of(minimal())
    wanted = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": context.metadata("a-coordinator"),
        "spec": {"ports": []},
    }
    server.put(wanted)
    cache = InformerCache(Cluster(cast("Any", server), on_write=lambda kind, verb: None))

    async def read_in_two_passes() -> list[int]:
        await cache.refresh(context, NOW, is_new=False, is_blocked=False)
        gets = []
        for _ in range(2):
            server.reads.clear()
            assert (await cache.read(wanted)).found is not None
            gets.append(len(server.reads))
            cache.end_pass()
        return gets

    assert asyncio.run(read_in_two_passes()) == [0, 1]
    (known,) = cache.labelled.values()
    assert known["metadata"]["name"] == "a-coordinator"
    assert "spec" not in known
