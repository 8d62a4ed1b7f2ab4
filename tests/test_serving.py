"""`fedsweep serve`: local only, read-only, following a growing ledger."""

import http.client
import json
import socket
import threading

import pytest
import reported
from handmade_ledgers import Writer, study, writing

from orchestrator.report.html import data, serving
from orchestrator.results.ledger import Ledger
from trainables.errors import UserError


@pytest.fixture
def server(tmp_path):
    reported.write(tmp_path, finished=False)
    running = serving.server(str(tmp_path), 0)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def ask(server, path, **headers):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request("GET", f"/{server.RequestHandlerClass.token}{path}", headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_and_its_data(server):
    answer, body = ask(server, "/")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"connect-src 'self'" in body
    answer, body = ask(server, "/data.json")
    assert json.loads(body)["studies"][0]["study"] == "by-hand"
    again, nothing = ask(server, "/data.json", **{"If-None-Match": answer.headers["ETag"]})
    assert (again.status, nothing) == (304, b"")


def test_only_this_machine_is_served(server):
    assert server.server_address[0] == "127.0.0.1"
    port = server.server_address[1]
    assert ask(server, "/", Host=f"localhost:{port}")[0].status == 200
    assert ask(server, "/", Host="localhost")[0].status == 200, "as a browser says it at port 80"
    assert ask(server, "/", Host=f"elsewhere.example:{port}")[0].status == 403
    assert ask(server, "/data.json", Host="127.0.0.1.elsewhere.example")[0].status == 403


def raw(server, path):
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize("path", ["/", "/data.json", "//", "/?token=x", "/x/", "/x/data.json", "/%2e%2e/", "/../"])
def test_other_users_of_the_machine_need_the_token(server, path):
    status, body = raw(server, path)
    assert status == 403
    assert b"by-hand" not in body
    assert raw(server, f"/{server.RequestHandlerClass.token}x/")[0] == 403


def test_the_printed_address_has_the_token(server):
    assert server.address.startswith(f"http://127.0.0.1:{server.server_address[1]}/")
    assert len(server.address.split("/")[3]) >= 20
    assert raw(server, "/" + server.address.split("/", 3)[3])[0] == 200
    assert serving.server(server.RequestHandlerClass.source.results, 0).address != server.address


def test_a_silent_connection_is_closed(server, monkeypatch):
    """Or another user could keep any number of them open."""
    assert serving.Handler.timeout == serving.TIMEOUT_S
    monkeypatch.setattr(serving.Handler, "timeout", 0.05)
    with socket.create_connection(server.server_address, timeout=10) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n")
        assert silent.recv(100) == b""


def test_results_at_a_url(tmp_path):
    """They are downloaded and followed; nothing is written there."""
    reported.write(tmp_path, finished=False)
    before = sorted(file.name for file in tmp_path.iterdir())
    running = serving.server(f"file://{tmp_path}", 0)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        answer, body = ask(running, "/data.json")
        assert answer.status == 200
        assert json.loads(body)["studies"][0]["study"] == "by-hand"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()
    assert sorted(file.name for file in tmp_path.iterdir()) == before


@pytest.mark.parametrize("path", ["/ledger.sqlite", "/../study.yaml", "/data.json/", "/x"])
def test_other_paths_are_not_found(server, path):
    assert ask(server, path)[0].status == 404


def test_it_follows_a_driver_without_blocking_it(tmp_path):
    """A driver writes while the page is read: neither waits for the other, and new results appear."""
    reported.write(tmp_path, finished=False)
    following = serving.Following(str(tmp_path))
    before, tag = following.current()
    assert following.current()[1] == tag
    with Ledger.write(tmp_path) as ledger:
        ledger._db.execute("PRAGMA busy_timeout = 0")  # the least wait for a reader would be an error
        writer = Writer(ledger, reported.hostile_study(), setting=reported.SETTING)
        for _ in range(3):
            following._next = 0.0
            assert following.current()[0]["studies"][0]["status"]["running"]
            reported.confirm(writer, 8)
    following._next = 0.0
    after, later = following.current()
    assert later != tag
    assert not before["studies"][0]["status"]["finished"]
    assert after["studies"][0]["status"]["finished"]
    assert after["studies"][0]["status"]["running"] is None


def test_only_the_cells_that_changed_are_computed_again(tmp_path, monkeypatch):
    """The page equals that of a fresh read."""
    reported.write(tmp_path, finished=False)
    computed = []
    content = data._Cell.content
    monkeypatch.setattr(
        data._Cell,
        "content",
        lambda cell, ledger, limits: computed.append(cell.cell.epsilon) or content(cell, ledger, limits),
    )
    following = serving.Following(str(tmp_path))
    assert sorted(computed) == [1, 1, 8, 8]
    computed.clear()
    with Ledger.write(tmp_path) as ledger:
        reported.confirm(Writer(ledger, reported.hostile_study(), setting=reported.SETTING), 8)
    following._next = 0.0
    found, _ = following.current()
    assert computed == [8, 8]
    assert found["studies"] == serving.html.read([str(tmp_path)])


def test_a_retried_trial_is_a_change(tmp_path):
    with writing(tmp_path, study(methods=["dp-fedgd"], epsilons=[8])) as writer:
        tried = {"learning_rate": 0.1}
        writer.search("dp-fedgd", 8, {"coarse": [(tried, "failed")]})
        following = serving.Following(str(tmp_path))
        writer.search("dp-fedgd", 8, {"coarse": [(tried, 61.0)]})
        following._next = 0.0
        (cell,) = following.current()[0]["studies"][0]["cells"]
        assert cell["search"]["mean"] == [61.0]


def test_it_idles_longer_than_it_works(tmp_path, monkeypatch):
    reported.write(tmp_path)
    clock = {"now": 100.0}
    monkeypatch.setattr(serving.time, "monotonic", lambda: clock["now"])
    read = serving.html.read

    def slowly(results, memory):
        clock["now"] += 10.0
        return read(results, memory)

    monkeypatch.setattr(serving.html, "read", slowly)
    following = serving.Following(str(tmp_path))
    following._read_version = None  # as if the ledger had changed at once
    clock["now"] += 89.0
    following.current()
    assert clock["now"] == 199.0, "90 s of idling after 10 s of work are not over"
    clock["now"] += 2.0
    following.current()
    assert clock["now"] == 211.0


def test_a_port_in_use_is_refused(server, fedsweep, tmp_path):
    port = server.server_address[1]
    code, _, err = fedsweep("serve", tmp_path, "--port", port)
    assert code == 2
    assert err == f"fedsweep: port = {port} cannot be used: Address already in use; choose another with --port.\n"


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no ledger\.sqlite$"):
        serving.server(str(tmp_path), 0)
