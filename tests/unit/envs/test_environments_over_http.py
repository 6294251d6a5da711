"""Environments over HTTP: a repeated request never steps twice, failures that may pass are retried and then waited for,
errors of the environment are its own, and a server that comes back is used again. Against a real server process.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

from rlsrl.data.slots import rollout_layout
from rlsrl.envs.check import check_environment
from rlsrl.envs.factory import AtariOptions, EnvironmentSource, environment_spec, make_environment
from rlsrl.envs.faults import EnvironmentFaults, FaultReason
from rlsrl.envs.http.access import ServerAccess
from rlsrl.envs.http.client import HttpEnv
from rlsrl.envs.http.options import HttpOptions
from rlsrl.envs.place import EnvironmentPlace
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.unreachable import EnvironmentUnreachable, RemoteEnvironmentError, WaitAbandoned
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.runtime.call_board import CALL_NAMES, LANE
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.testing.environment_server import EnvironmentServer
from rlsrl.testing.http_proxy import FaultyProxy, ProxyAnswer, Request
from rlsrl.testing.served_environments import ServedEnv
from rlsrl.testing.servers import free_address
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

SERVED = ("--factory", "rlsrl.testing.served_environments:ServedEnv")
ACTION = (2, np.array([0.5, -0.5], np.float32))
GATEWAYS_PAGE = b"""<html>
<head><title>It does not work</title></head>
<body><center><h1>It does not work</h1></center><hr><center>gateway/1.0</center></body>
</html>
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentServer]:
    with EnvironmentServer(tmp_path_factory.mktemp("server"), *SERVED, "--kwargs", '{"size": 3}') as server:
        yield server


@pytest.fixture
def proxy(server: EnvironmentServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.url) as proxy:
        yield proxy


def quick(url: str, **options: Any) -> HttpOptions:
    return HttpOptions(**{"url": url, "backoff_seconds": 0.001, "max_backoff_seconds": 0.01, **options})


def open_env(url: str, *, kwargs: dict[str, Any] | None = None, **options: Any) -> HttpEnv:
    return HttpEnv(ServerAccess(quick(url, **options)), kwargs=kwargs)


def drop(
    method: str, path: str, times: int = 1, *, instead: Literal[False] | ProxyAnswer = False
) -> Callable[[Request], bool | ProxyAnswer]:
    left = [times]

    def hook(request: Request) -> bool | ProxyAnswer:
        if request.method != method or not request.path.endswith(path) or not left[0]:
            return True
        left[0] -= 1
        return instead

    return hook


def ask(
    server: EnvironmentServer, method: str, path: str, body: Any = None, *, authorization: str = ""
) -> tuple[int, dict[str, Any]]:
    content = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": authorization} if authorization else {})}
    request = urllib.request.Request(server.url + path, data=content, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
            return answer.status, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_it_is_the_environment(server: EnvironmentServer) -> None:
    here, there = ServedEnv(size=5), open_env(server.url, kwargs={"size": 5})
    with closing(there):
        assert there.observation_space == here.observation_space
        assert there.action_space == here.action_space
        for method in ("reset", "step"):
            arguments: Any = {"seed": 7, "options": {"level": [1]}} if method == "reset" else {"action": ACTION}
            expected, found = getattr(here, method)(**arguments), getattr(there, method)(**arguments)
            info = expected[-1]
            assert found[1:-1] == expected[1:-1]
            assert there.observation_space.contains(found[0])
            assert np.array_equal(found[0]["image"], expected[0]["image"])
            assert found[0]["before"][0] == expected[0]["before"][0]
            assert found[-1].keys() == info.keys() - {"object"}
        assert found[-1]["array"].tolist() == [0, 1, 2]
        assert found[-1]["inf"] == np.inf


def test_it_keeps_gymnasiums_contract(server: EnvironmentServer) -> None:
    with closing(open_env(server.url)) as env:
        spec = check_environment(env)
    assert spec.observation["observation/count"].shape == (3,), "the server's own arguments"


def test_the_factory_wraps_it_and_passes_arguments_and_place(server: EnvironmentServer) -> None:
    place = EnvironmentPlace(purpose="training", rank=6, num_environments=8, worker=1, local_rank=2, seed=9)
    source = EnvironmentSource(http=quick(server.url), kwargs={"size": 1}, place=place, max_episode_steps=2)
    with closing(make_environment(source)) as env:
        assert env.reset(seed=0)[1]["rank"] == 6
        assert not env.step(ACTION)[3]
        assert env.step(ACTION)[3], "truncated by maxEpisodeSteps"
    assert environment_spec(source).observation["observation/count"].shape == (1,)


def test_preprocessing_of_atari_is_refused(server: EnvironmentServer) -> None:
    atari = AtariOptions(frame_skip=4, screen_size=84, noop_max=30, terminal_on_life_loss=False)
    with pytest.raises(ConfigurationError, match="remove `atari`"):
        make_environment(EnvironmentSource(http=quick(server.url), atari=atari))


def test_numbers_that_are_not_finite_arrive(server: EnvironmentServer) -> None:
    # The server's arguments are JSON, and so are those of a session.
    with closing(open_env(server.url, kwargs={"reward": float("nan")})) as env:
        env.reset(seed=0)
        assert np.isnan(env.step(ACTION)[1])


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_request_that_is_lost_is_sent_again_and_steps_once(
    server: EnvironmentServer, proxy: FaultyProxy, lost: str
) -> None:
    with closing(open_env(proxy.endpoint)) as env:
        env.reset(seed=0)
        before = server.num_steps
        hook = drop("POST", "/step", 3)
        if lost == "answer":
            proxy.after = hook
        else:
            proxy.before = hook
        assert env.step(ACTION)[0]["count"].tolist() == [1, 1, 1]
        assert env.step(ACTION)[0]["count"].tolist() == [2, 2, 2]
        assert server.num_steps == before + 2
        assert len([each for each in proxy.requests if each.path.endswith("/step")]) == 5


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_step_that_a_gateway_answers_in_the_servers_place_is_tried_again_and_taken_once(
    server: EnvironmentServer, proxy: FaultyProxy, status: int
) -> None:
    page = ProxyAnswer(status=status, body=GATEWAYS_PAGE)
    with closing(open_env(proxy.endpoint)) as env:
        env.reset(seed=0)
        before = server.num_steps
        proxy.before = drop("POST", "/step", instead=page)  # without asking the server
        proxy.after = drop("POST", "/step", instead=page)  # and once after the server has stepped
        assert env.step(ACTION)[0]["count"].tolist() == [1, 1, 1]
        assert env.step(ACTION)[0]["count"].tolist() == [2, 2, 2]
        assert server.num_steps == before + 2
        assert len([each for each in proxy.requests if each.path.endswith("/step")]) == 4


def test_a_gateway_that_knows_no_such_page_is_refused_at_once_in_one_line(proxy: FaultyProxy) -> None:
    proxy.before = drop("PUT", "", instead=ProxyAnswer(status=404, body=100 * GATEWAYS_PAGE))
    with pytest.raises(ConfigurationError) as caught:
        open_env(proxy.endpoint)
    text = str(caught.value)
    assert text.startswith(f"the environment server {proxy.endpoint} refuses PUT /v1/sessions/")
    assert "404: <html> <head><title>It does not work</title></head>" in text
    assert text.endswith("; is there an environment server at environment.http.url?")
    assert "\n" not in text
    assert len(text) < 600
    assert [each.method for each in proxy.requests] == ["PUT", "DELETE"], "it was not tried again"


def test_a_gateway_whose_server_stays_away_is_quoted_in_one_line(proxy: FaultyProxy) -> None:
    proxy.before = drop("PUT", "", times=9, instead=ProxyAnswer(status=502, body=GATEWAYS_PAGE))
    with pytest.raises(EnvironmentUnreachable) as caught:
        open_env(proxy.endpoint, retries=2)
    text = str(caught.value)
    assert text.startswith(f"the environment server {proxy.endpoint} is away: status 502: <html> <head><title>It does")
    assert "\n" not in text


def test_a_step_that_is_still_running_is_not_begun_again(server: EnvironmentServer) -> None:
    with closing(open_env(server.url, kwargs={"step_seconds": 0.6}, timeout_seconds=0.25, retries=20)) as env:
        env.reset(seed=0)
        before = server.num_steps
        assert env.step(ACTION)[0]["count"][0] == 1
        assert server.num_steps == before + 1


def test_keys_other_than_the_last_and_the_next_are_refused(server: EnvironmentServer) -> None:
    session = "/v1/sessions/keys"
    assert ask(server, "PUT", session, {})[0] == 200
    assert ask(server, "POST", f"{session}/reset", {"key": 1, "seed": 3})[0] == 200
    action = [1, [0.0, 0.0]]
    first = ask(server, "POST", f"{session}/step", {"key": 2, "action": action})
    assert first[0] == 200
    assert ask(server, "POST", f"{session}/step", {"key": 2, "action": action}) == first
    for key in (1, 4):
        status, reply = ask(server, "POST", f"{session}/step", {"key": key, "action": action})
        assert (status, reply["error"]) == (409, "wrong_key")
        assert reply["message"] == f"key is {key}; allowed: 2 (a repeat) or 3"
    assert ask(server, "PUT", session, {})[0] == 200, "a repeat changes nothing"
    assert ask(server, "POST", f"{session}/step", {"key": 3, "action": action})[1]["info"]["taken"] == 2
    assert ask(server, "DELETE", session)[0] == 204
    assert ask(server, "DELETE", session)[0] == 204


def test_the_interface_describes_itself(server: EnvironmentServer) -> None:
    paths = ask(server, "GET", "/openapi.json")[1]["paths"]
    assert set(paths) == {
        "/v1/state",
        "/v1/spaces",
        "/v1/sessions/{session}",
        "/v1/sessions/{session}/reset",
        "/v1/sessions/{session}/step",
    }
    assert ask(server, "GET", "/v1/spaces")[1]["action_space"]["type"] == "Tuple"


def test_the_page_of_the_interface_shows_all_of_it_and_loads_nothing(server: EnvironmentServer) -> None:
    document = ask(server, "GET", "/openapi.json")[1]
    with urllib.request.urlopen(f"{server.url}/docs", timeout=DEADLINE_SECONDS) as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    for path, item in document["paths"].items():
        assert all(f"{method.upper()} {path}" in page for method in item)
    for name, schema in document["components"]["schemas"].items():
        assert f'id="{name}"' in page
        assert all(f"<code>{field}</code>" in page for field in schema["properties"])
    assert set(re.findall(r'(?:href|src|action)="([^"#]*)', page)) == {"", "/openapi.json"}
    assert not re.search(r"<script|<link|url\(|@import|//", page)
    assert policy.startswith("default-src 'none';")
    assert ask(server, "GET", "/redoc")[0] == 404, "FastAPI's other page"


def test_malformed_requests_say_what_is_wrong(server: EnvironmentServer) -> None:
    status, reply = ask(server, "POST", "/v1/sessions/none/step", {"action": 1, "kee": 1})
    assert (status, reply["error"]) == (422, "invalid")
    assert "body.key: Field required" in reply["message"]
    assert "body.kee" in reply["message"]


def test_an_environment_that_waits_keeps_no_other_waiting(server: EnvironmentServer) -> None:
    with (
        closing(open_env(server.url, kwargs={"step_seconds": 1.0})) as slow,
        closing(open_env(server.url)) as fast,
    ):
        slow.reset(seed=0)
        fast.reset(seed=0)
        thread = threading.Thread(target=slow.step, args=[ACTION])
        thread.start()
        for _ in range(5):
            fast.step(ACTION)
        assert thread.is_alive()
        thread.join()


def test_an_error_of_the_environment_is_its_own_and_shows_its_traceback(server: EnvironmentServer) -> None:
    with closing(open_env(server.url, kwargs={"raises_at": 2})) as env:
        env.reset(seed=0)
        env.step(ACTION)
        with pytest.raises(RemoteEnvironmentError, match="the arm is stuck") as caught:
            env.step(ACTION)
    assert caught.value.kind == "ArithmeticError"
    assert "served_environments.py" in caught.value.traceback
    assert caught.value.traceback.endswith("ArithmeticError: the arm is stuck\n")


def test_wrong_arguments_are_configuration_errors_with_the_servers_text(server: EnvironmentServer) -> None:
    with pytest.raises(ConfigurationError, match=r"422: .*does not take these kwargs.*did you mean 'size'"):
        open_env(server.url, kwargs={"sice": 3})


def test_an_address_without_an_environment_server_is_a_configuration_error(server: EnvironmentServer) -> None:
    with pytest.raises(ConfigurationError, match=r"404: .*is there an environment server at environment.http.url"):
        open_env(f"{server.url}/somewhere")


def test_a_server_that_is_away_is_named_after_the_last_try(proxy: FaultyProxy) -> None:
    proxy.before = lambda _: False
    with pytest.raises(EnvironmentUnreachable, match=rf"{proxy.endpoint} is away: the server closed the connection"):
        open_env(proxy.endpoint, retries=2)
    assert [each.method for each in proxy.requests] == ["PUT", "PUT", "PUT", "DELETE"]
    gone = f"http://{free_address()}"
    with pytest.raises(EnvironmentUnreachable, match=r"Connection refused"):
        open_env(gone, retries=0)


def test_an_open_breaker_sends_nothing_until_a_probe_is_answered(proxy: FaultyProxy) -> None:
    access = ServerAccess(quick(proxy.endpoint, retries=10, breaker_failures=4))
    with closing(HttpEnv(access)) as env, closing(HttpEnv(access)) as other:
        env.reset(seed=0)
        other.reset(seed=0)
        proxy.requests.clear()
        proxy.before = lambda _: False
        with pytest.raises(EnvironmentUnreachable):
            env.step(ACTION)
        assert access.is_open
        num_sent = len(proxy.requests)
        assert num_sent == 4
        with pytest.raises(EnvironmentUnreachable) as caught:
            other.step(ACTION)
        assert len(proxy.requests) == num_sent, "it failed at once"
        assert not caught.value.wait(0.05)
        probes = {each.path for each in proxy.requests[num_sent:]}
        assert probes == {"/v1/state"}
        proxy.reset()
        until(lambda: caught.value.wait(0.05), "a probe is answered")
        assert not access.is_open
        other.reset(seed=0)
        assert other.step(ACTION)[0]["count"][0] == 1


def test_one_answer_of_a_probe_does_not_forgive_the_failures(proxy: FaultyProxy) -> None:
    access = ServerAccess(quick(proxy.endpoint, retries=10, breaker_failures=3))
    with closing(HttpEnv(access)) as env:
        env.reset(seed=0)
        proxy.before = lambda request: request.path == "/v1/state"
        with pytest.raises(EnvironmentUnreachable):
            env.step(ACTION)
        until(lambda: access.wait(0.05), "a probe is answered")
        proxy.requests.clear()
        with pytest.raises(EnvironmentUnreachable):
            env.reset(seed=0)
        assert access.is_open
        assert len(proxy.requests) == 1, "the next failure opens it again"


def test_a_session_that_expired_is_lost_and_a_reset_begins_another(tmp_path: Path) -> None:
    with EnvironmentServer(tmp_path, *SERVED, "--idle-seconds", "0.5") as server, closing(open_env(server.url)) as env:
        env.reset(seed=0)
        until(lambda: server.state()["num_sessions"] == 0, "the session has expired")
        with pytest.raises(EnvironmentUnreachable, match="has lost the episode: there is no session"):
            env.step(ACTION)
        env.reset(seed=0)
        assert env.step(ACTION)[0]["count"][0] == 1


def test_a_token_is_required_and_sent(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token\n")
    token = str(tmp_path / "token")
    with EnvironmentServer(tmp_path, *SERVED, "--token-file", token, token="a-token") as served:
        with pytest.raises(ConfigurationError, match=r"401: .*set environment.http.tokenFile"):
            open_env(served.url)
        open_env(served.url, token_file=token).close()


def test_a_token_of_several_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token\r\nX-Other: header\n")
    with pytest.raises(
        ConfigurationError, match=r"environment.http.tokenFile: .*/token has several lines; allowed: one"
    ):
        open_env("http://127.0.0.1:9", token_file=str(tmp_path / "token"))


def test_every_documented_call_needs_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token\n")
    with EnvironmentServer(tmp_path, *SERVED, "--token-file", str(tmp_path / "token"), token="a-token") as served:
        paths = ask(served, "GET", "/openapi.json")[1]["paths"]
        calls = [(method.upper(), path) for path, methods in paths.items() for method in methods]
        assert len(calls) == 6
        for method, path in calls:
            assert "401" in paths[path][method.lower()]["responses"], (method, path)
            body = {"PUT": {}, "POST": {"key": 1}}.get(method)
            for given in ("", "Bearer another"):
                status, _ = ask(served, method, path.replace("{session}", "s"), body, authorization=given)
                assert status == 401, (method, path, given)


def test_a_server_that_is_full_is_tried_again(tmp_path: Path) -> None:
    with EnvironmentServer(tmp_path, *SERVED, "--max-sessions", "1") as server:
        first = open_env(server.url)
        with pytest.raises(EnvironmentUnreachable, match="status 503: the server has 1 sessions; allowed: 1"):
            open_env(server.url, retries=1)
        first.close()
        open_env(server.url).close()


def test_sigterm_ends_the_server_and_closes_its_environments(tmp_path: Path) -> None:
    with EnvironmentServer(tmp_path, *SERVED) as server:
        env = open_env(server.url)
        env.reset(seed=0)
        assert server.terminate() in (0, -15)


# Vector environments: what an actor makes of it.


class Tally:
    def __init__(self) -> None:
        self.reasons: list[FaultReason] = []
        self.lines: list[str] = []
        self.waits: list[tuple[int, str]] = []

    def faults(self, **options: Any) -> EnvironmentFaults:
        return EnvironmentFaults(
            on_fault=self.reasons.append,
            on_own_fault=lambda _, __, line: self.lines.append(line),
            on_wait=lambda number, reason: self.waits.append((number, reason)),
            **options,
        )


def cartpole(tmp_path: Path) -> EnvironmentServer:
    return EnvironmentServer(tmp_path, "--id", "CartPole-v1")


def slot_of(envs: VectorEnv, num_steps: int = 16) -> dict[str, Any]:
    layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=envs.num_envs)
    return layout.view(bytearray(layout.nbytes))


def test_an_outage_truncates_the_episodes_and_the_environments_are_made_again(tmp_path: Path) -> None:
    with cartpole(tmp_path) as server:
        tally, access = Tally(), ServerAccess(quick(server.url))
        envs = LoopVectorEnv(lambda _: HttpEnv(access), seeds=[1, 2], faults=tally.faults(error_budget=0))
        with closing(envs):
            arrays = slot_of(envs)
            envs.begin(arrays)
            for step in range(3):
                envs.step(arrays, step, np.zeros(2, np.int64))
            for _ in range(2):
                server.kill()
                thread = threading.Thread(target=envs.step, args=(arrays, 3, np.zeros(2, np.int64)))
                thread.start()
                until(lambda: access.is_open, "the breaker is open")
                assert thread.is_alive()
                server.start()
                thread.join(DEADLINE_SECONDS)
                assert not thread.is_alive()
                arrays["mask"][3] = True
            envs.step(arrays, 4, np.zeros(2, np.int64))
        assert arrays["truncated"][2].all()
        assert arrays["mask"][4].all()
        assert np.isfinite(arrays["observation"][:6]).all()
        assert tally.reasons == ["unreachable"] * 4, "once for each environment and outage"
        assert tally.lines[0].startswith("environment rank 0: the environment server http://127.0.0.1:")


def test_the_environments_that_wait_are_reported_with_the_reason(tmp_path: Path) -> None:
    wanted = threading.Event()
    wanted.set()
    with cartpole(tmp_path) as server, ThreadPoolExecutor() as pool, ExitStack() as stack:
        stack.callback(wanted.clear)  # a failure of the test abandons the waits
        tally, access = Tally(), ServerAccess(quick(server.url))
        faults = tally.faults()

        def make(*seeds: int) -> LoopVectorEnv:
            return LoopVectorEnv(lambda _: HttpEnv(access), seeds=seeds, faults=faults, still_wanted=wanted.is_set)

        def begin(envs: LoopVectorEnv) -> None:
            envs.begin(slot_of(envs))

        server.kill()
        making = pool.submit(make, 1, 2)
        until(lambda: tally.waits, "they wait while they are made")
        number, reason = tally.waits[0]
        assert number == 2
        assert reason.startswith(f"the environment server {server.url} is away: ")
        server.start()
        both = [making.result(DEADLINE_SECONDS), make(3)]
        for envs in both:
            stack.callback(envs.close)
        assert tally.waits[-1][0] == 0
        server.kill()
        began = [pool.submit(begin, envs) for envs in both]
        until(lambda: any(number == 3 for number, _ in tally.waits), "all three wait")
        server.start()
        for each in began:
            each.result(DEADLINE_SECONDS)
        assert tally.waits[-1][0] == 0


def test_an_episode_that_the_server_has_lost_is_no_wait(tmp_path: Path) -> None:
    with cartpole(tmp_path) as server:
        tally, access = Tally(), ServerAccess(quick(server.url))
        with closing(LoopVectorEnv(lambda _: HttpEnv(access), seeds=[1], faults=tally.faults())) as envs:
            arrays = slot_of(envs)
            envs.begin(arrays)
            server.kill()
            server.start()
            envs.step(arrays, 0, np.zeros(1, np.int64))
        assert tally.reasons == ["unreachable"]
        assert tally.waits == []


def test_the_call_board_shows_the_wait_and_an_actor_that_exits_abandons_it(tmp_path: Path) -> None:
    with cartpole(tmp_path) as server:
        wanted = threading.Event()
        wanted.set()
        access = ServerAccess(quick(server.url))
        envs = LoopVectorEnv(lambda _: HttpEnv(access), seeds=[1], still_wanted=wanted.is_set)
        with closing(envs):
            arrays = slot_of(envs)
            envs.begin(arrays)
            server.kill()
            caught: list[BaseException] = []

            def step() -> None:
                try:
                    envs.step(arrays, 0, np.zeros(1, np.int64))
                except WaitAbandoned as error:
                    caught.append(error)

            thread = threading.Thread(target=step)
            thread.start()
            entry = envs._calls
            until(lambda: entry[LANE] == 0 and CALL_NAMES[entry[2]] == "wait", "the board shows the wait")
            wanted.clear()
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()
        assert "environment rank 0: the environment server" in str(caught[0])


def test_threads_wait_for_a_server_that_starts_late_and_can_be_abandoned(tmp_path: Path) -> None:
    with cartpole(tmp_path) as server:
        server.kill()
        access, made = ServerAccess(quick(server.url)), []

        def make() -> None:
            made.append(EnvironmentThreads(lambda _: HttpEnv(access), seeds=[1, 2]))

        thread = threading.Thread(target=make)
        thread.start()
        until(lambda: access.is_open, "the breaker is open")
        server.start()
        thread.join(DEADLINE_SECONDS)
        (threads,) = made
        arrays = rollout_layout(threads.spec, num_steps=4, num_lanes=1)
        slots = [arrays.view(bytearray(arrays.nbytes)) for _ in range(2)]

        def job(lane: int, envs: VectorEnv) -> None:
            envs.begin(slots[lane])
            envs.step(slots[lane], 0, np.zeros(1, np.int64))

        threads.begin(job)
        assert threads.wait(lambda: threads.num_done == 1, DEADLINE_SECONDS)
        server.kill()
        threads.begin(job)
        until(lambda: access.is_open, "the breaker is open")
        threads.close()
        assert not any(each.name.startswith("environment-") for each in threading.enumerate())


def test_errors_of_remote_environments_spend_the_budget_and_show_their_tracebacks(server: EnvironmentServer) -> None:
    tally, access = Tally(), ServerAccess(quick(server.url))
    make = partial(HttpEnv, access, kwargs={"raises_at": 1})
    envs = LoopVectorEnv(lambda _: make(), seeds=[1], faults=tally.faults(error_budget=1))
    with closing(envs):
        arrays = slot_of(envs)
        envs.begin(arrays)
        action = np.zeros((1, 3), np.float32)
        envs.step(arrays, 0, action)
        with pytest.raises(EnvironmentFailed, match="raised ArithmeticError: the arm is stuck") as caught:
            envs.step(arrays, 1, action)
    assert tally.reasons == ["environment_error"] * 2
    assert "served_environments.py" in caught.value.traceback


def test_an_outage_counts_once_however_often_the_server_fails_meanwhile() -> None:
    tally, away = Tally(), [False]

    class Remote(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            away[0] = True
            raise EnvironmentUnreachable("no answer", wait=lambda _: True)

    def make(_: int) -> gymnasium.Env[Any, Any]:
        num_made[0] += 1
        if away[0] and num_made[0] < 5:
            raise EnvironmentUnreachable("no answer", wait=lambda _: True)
        return Remote(gymnasium.make("CartPole-v1"))

    num_made = [0]
    with closing(LoopVectorEnv(make, seeds=[1], faults=tally.faults(error_budget=0))) as envs:
        arrays = slot_of(envs)
        envs.begin(arrays)
        envs.step(arrays, 0, np.zeros(1, np.int64))
    assert num_made == [5]
    assert tally.reasons == ["unreachable"]


def test_sources_have_exactly_one_of_three() -> None:
    with pytest.raises(ConfigurationError, match="set exactly one of them"):
        EnvironmentSource(id="CartPole-v1", http=quick("http://127.0.0.1:1"))
