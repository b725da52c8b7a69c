"""A page that is served: to this machine alone, one address, nothing from the disk."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator

import pytest

from torchweld.core.errors import TorchweldError
from torchweld.pages.page_server import HOST, PageServer

HTML = "<!doctype html><title>größer</title>"


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(HTML) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def answer(
    server: PageServer, path: str = "/", host: str | None = None, method: str = "GET"
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=20)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    found = connection.getresponse()
    body, headers = found.read(), dict(found.getheaders())
    connection.close()
    return found.status, body, headers


def test_the_page_is_served(server: PageServer, capfd: pytest.CaptureFixture[str]) -> None:
    assert server.address == f"http://127.0.0.1:{server.server_port}/"
    status, body, headers = answer(server)
    assert (status, body.decode()) == (200, HTML)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer(server, "/?again")[0] == 200
    assert answer(server, method="HEAD")[:2] == (200, b"")
    assert answer(server, host=f"localhost:{server.server_port}")[0] == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("path", ["/etc/passwd", "/../..", "/report.html"])
def test_nothing_else_is(server: PageServer, path: str) -> None:
    assert answer(server, path)[0] == 404


def test_other_names_that_point_here_get_nothing(server: PageServer) -> None:
    status, body, _ = answer(server, host="evil.example")
    assert status == 403
    assert HTML.encode() not in body


def test_it_listens_to_this_machine_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_said(server: PageServer) -> None:
    with pytest.raises(TorchweldError, match=f"port {server.server_port} is in use"):
        PageServer(HTML, server.server_port)
    with pytest.raises(TorchweldError, match="port 70000 cannot be used"):
        PageServer(HTML, 70000)
