"""SIGKILL at random moments of a process that does nothing but update its page."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsrl.runtime.ledger import LedgerPage, Mark, PageRecord, read_page

NUM_KILLS = 60

# Forks of one process that has imported everything, because a life lasts a few milliseconds. Each life counts on one
# page as an actor and a trainer do; each slot has one transition more than the previous one.
LIVES = """
import os, sys
from pathlib import Path
from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger import ActorLedger, LedgerPage, TrainerLedger

def life(path):
    page = LedgerPage.open(path, "actor", 0)
    actor, trainer = ActorLedger(page), TrainerLedger(page)
    trainer.resume(None, incarnation=page.record.incarnation)
    me = ProducerId(0, page.record.incarnation + 1)
    actor.begin(me.incarnation)
    trainer.meet(me, actor.progress())
    actor.forget_settled(me.incarnation)
    sequence = 0
    while True:
        total = actor.produce(sequence, sequence + 1)
        trainer.take(me, sequence, sequence + 1, total)
        actor.acknowledge(sequence)
        trainer.trained(sequence + 1)
        sequence += 1

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        life(Path(line.strip()))
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture
def lives() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", LIVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        yield it
        assert it.stdin is not None
        it.stdin.close()
        it.wait(timeout=30)


def check(record: PageRecord) -> None:
    """What holds between any two updates: every transition produced is somewhere, once."""
    mark = record.marks.get(0, Mark(-1, -1))
    under_way = sum(each.num_transitions for each in record.unacknowledged if not mark.covers(*each[:2]))
    terms = ("trained", "in_buffer", "lost.producer_died", "lost.rolled_back", "lost.receiver_died")
    assert record.counters["produced"] == sum(record.counters[term] for term in terms) + under_way


def test_no_kill_at_any_moment_leaves_half_an_update(tmp_path: Path, lives: "subprocess.Popen[str]") -> None:
    assert lives.stdin is not None
    assert lives.stdout is not None
    path = tmp_path / "actor-0.page"
    rng = random.Random(0)
    before = PageRecord(role="actor", index=0)
    sequences = set()
    for _ in range(NUM_KILLS):
        print(path, file=lives.stdin, flush=True)
        pid = int(lives.stdout.readline())
        target = rng.randrange(30)
        for _ in range(1_000_000):
            record = read_page(path) or before
            check(record)
            if record.incarnation > before.incarnation and record.sequence >= target:
                break
        else:
            pytest.fail(f"the life under {pid} did not get to slot {target}")
        os.kill(pid, signal.SIGKILL)
        assert lives.stdout.readline() == f"{-signal.SIGKILL}\n"
        left = read_page(path)
        assert left is not None
        check(left)
        with LedgerPage.open(path, "actor", 0) as page:
            assert page.record == left, "the lock died with the process, and nothing needs mending"
        sequences.add(left.sequence)
        before = left
    assert before.lives == 2 * NUM_KILLS, "resume and begin, once a life"
    assert len(sequences) > 10, "the kills came at many moments"
    assert before.counters["lost.rolled_back"] > 0
    assert before.counters["trained"] <= before.sequence * (before.sequence + 1) // 2 + before.sequence + 1
