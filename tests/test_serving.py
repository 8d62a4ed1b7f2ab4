"""`fedsweep serve`: on this machine alone, reading only, following what grows."""

import http.client
import json
import threading

import pytest
import reported
from test_tables import Writer

from orchestrator.report.page import serving
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
    connection.request("GET", path, headers=headers)
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
    assert ask(server, "/", Host=f"elsewhere.example:{port}")[0].status == 403
    assert ask(server, "/data.json", Host="127.0.0.1.elsewhere.example")[0].status == 403


@pytest.mark.parametrize("path", ["/ledger.sqlite", "/../study.yaml", "/data.json/", "/x"])
def test_there_is_nothing_else(server, path):
    assert ask(server, path)[0].status == 404


def test_it_follows_a_driver_without_holding_it_up(tmp_path):
    """A driver writes while the page is read: neither waits for the other, and what is written is shown."""
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


def test_it_rests_longer_than_it_works(tmp_path, monkeypatch):
    reported.write(tmp_path)
    clock = {"now": 100.0}
    monkeypatch.setattr(serving.time, "monotonic", lambda: clock["now"])
    read = serving.page.read

    def slowly(results):
        clock["now"] += 10.0
        return read(results)

    monkeypatch.setattr(serving.page, "read", slowly)
    following = serving.Following(str(tmp_path))
    following._seen = None  # as if the ledger had changed at once
    clock["now"] += 89.0
    following.current()
    assert clock["now"] == 199.0, "90 s of rest for 10 s of work are not over"
    clock["now"] += 2.0
    following.current()
    assert clock["now"] == 211.0


def test_a_port_in_use_is_a_sentence(server, fedsweep, tmp_path):
    port = server.server_address[1]
    code, _, err = fedsweep("serve", tmp_path, "--port", port)
    assert code == 2
    assert err == f"fedsweep: port = {port} cannot be used: Address already in use; choose another with --port.\n"


def test_no_results_no_server(tmp_path):
    with pytest.raises(UserError, match=r"holds no ledger\.sqlite$"):
        serving.server(str(tmp_path), 0)
