"""Starting the console: on localhost only, unless TLS or an option allows more, and never without a token."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from free_ports import free_port
from run_tools import Command, environment
from sifu.cli import console_commands
from sifu.errors import InputError
from sifu_console.serving import Binding, check_binding, listen, server


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_it_does_not_listen_elsewhere_without_tls(host: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in the clear"):
        check_binding(Binding(host))
    check_binding(Binding(host, without_tls=True))
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("x")
    check_binding(Binding(host, certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem"))


def test_half_of_tls_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("x")
    with pytest.raises(InputError, match="both"):
        check_binding(Binding(certificate=tmp_path / "cert.pem"))
    with pytest.raises(InputError, match="not a file"):
        check_binding(Binding(certificate=tmp_path / "cert.pem", key=tmp_path / "nothing.pem"))


def test_the_command_refuses_what_cannot_work(tmp_path: Path, cli: Command) -> None:
    assert "there is no token to log in with" in cli("serve", tmp_path).err
    assert cli("serve", tmp_path / "nowhere").code == 2
    assert "in the clear" in cli("serve", tmp_path, "--host", "0.0.0.0").err
    assert cli("serve", tmp_path, "--port", "99999").code == 2


@pytest.mark.parametrize("command", ["serve runs --port 5", "token create runs --name ann", "token --help"])
def test_without_the_package_its_commands_say_what_to_install(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(console_commands, "PACKAGE", "not_there")
    app = typer.Typer()
    console_commands.add_console_commands(app)
    refused = CliRunner().invoke(app, command.split()).exception
    assert isinstance(refused, InputError)
    assert refused.exit_code == 2
    assert "./console" in str(refused)


def test_a_port_in_use_is_said_before_anything_else(service: Any, cli: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = cli("serve", service.folder, "--port", str(taken.getsockname()[1]))
    assert answer.code == 2
    assert "cannot listen on 127.0.0.1" in answer.err
    assert "listens at" not in answer.out


def test_proxies_are_addresses(tmp_path: Path, cli: Command) -> None:
    check_binding(Binding(proxies=["10.0.0.7", "10.1.0.0/16"]))
    assert "not an address" in cli("serve", tmp_path, "--proxy", "everyone").err


@pytest.mark.parametrize(
    ("binding", "secure"),
    [
        (Binding(), False),
        (Binding(proxies=["10.0.0.7"]), True),
        (Binding("192.0.2.1", without_tls=True), True),
        (Binding(certificate=Path("c"), key=Path("k")), True),
    ],
)
def test_cookies_are_secure_wherever_browsers_use_https(service: Any, binding: Binding, secure: bool) -> None:
    from sifu_console.app import Settings, make_app
    from sifu_console.tokens import state_folder

    service.app = make_app(Settings([service.folder], state_folder(service.folder), secure_cookie=binding.encrypted))
    cookie = service.stranger().post("/login", data={"token": service.secrets["otto"]}).headers["set-cookie"]
    assert ("Secure" in cookie) == secure


@contextmanager
def serving(app: Any, binding: Binding, limit: int = 100) -> Iterator[int]:
    """Run a real server in a thread; yield its port."""
    listening = listen(replace(binding, port=0))
    running = server(app, binding, limit)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join(20)


def answer_to(port: int, head: bytes, patience: float = 20.0) -> bytes:
    """Return a server's answer to `head`; empty if it closes the connection without an answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
        connection.sendall(head)
        parts = []
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                parts.append(part)
    return b"".join(parts)


ASK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def test_connections_and_heads_are_limited(service: Any) -> None:
    with serving(service.app, Binding(), limit=3) as port:
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        assert answer_to(port, ASK).startswith(b"HTTP/1.1 503")
        for connection in waiting:
            connection.close()
        time.sleep(0.2)
        assert answer_to(port, ASK).startswith(b"HTTP/1.1 200")
        assert answer_to(port, ASK[:-2] + b"X: " + b"x" * (20 << 10)).startswith(b"HTTP/1.1 400")


def test_forwarded_addresses_count_from_proxies_alone(service: Any) -> None:
    """Failed logins are counted by address: a forwarded address counts only if it comes from a trusted proxy."""
    for proxies, last in (([], b"429"), (["127.0.0.1"], b"401")):
        from sifu_console.app import Settings, make_app
        from sifu_console.tokens import state_folder

        app = make_app(Settings([service.folder], state_folder(service.folder)))
        with serving(app, Binding(proxies=proxies)) as port:
            for number in range(14):
                head = (
                    f"POST /login HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 192.0.2.{number}\r\n"
                    "Connection: close\r\nContent-Length: 7\r\n\r\ntoken=x"
                )
                answer = answer_to(port, head.encode())[9:12]
            assert answer == last


EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "console"


def nginx_command(folder: Path, outside: int, port: int) -> list[str]:
    """Return the nginx command for the documented configuration, with this machine's ports and a self-signed
    certificate.
    """
    changes = {
        "listen 443": f"listen 127.0.0.1:{outside}",
        "127.0.0.1:8765": f"127.0.0.1:{port}",
        "/etc/ssl/": f"{folder}/",
        "desk.example.org;": "localhost;",
    }
    text = documented("nginx.conf", changes)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    http = f"http {{ access_log off; {places} {text} }}"
    (folder / "nginx.conf").write_text(f"daemon off; error_log stderr; pid {folder}/pid; events {{}} {http}")
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy_command(folder: Path, outside: int, port: int) -> list[str]:
    """Return the Caddy command for the documented configuration, with a local certificate instead of a fetched one."""
    own = f"https://localhost:{outside} {{\n\ttls {folder}/desk.crt {folder}/desk.key"
    text = documented("Caddyfile", {"desk.example.org {": own, "127.0.0.1:8765": f"127.0.0.1:{port}"})
    settings = "{\n\tadmin off\n\tauto_https disable_redirects\n}\n"
    (folder / "Caddyfile").write_text(settings + text)
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


def documented(name: str, changes: dict[str, str]) -> str:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize("proxy", ["nginx", "caddy"])
def test_the_documented_proxy_encrypts_and_tells_who_asks(service: Any, tmp_path: Path, proxy: str) -> None:
    """Behind the proxy, cookies are secure, forms pass, and visitors cannot choose the address that logins
    count by.
    """
    from sifu_console.app import Settings, make_app
    from sifu_console.tokens import state_folder

    if shutil.which(proxy) is None:
        pytest.skip(f"there is no {proxy} on this machine")
    make_certificate(tmp_path)
    app = make_app(Settings([service.folder], state_folder(service.folder), secure_cookie=True))
    with serving(app, Binding(proxies=["127.0.0.1"])) as port:
        outside = free_port()
        command = {"nginx": nginx_command, "caddy": caddy_command}[proxy](tmp_path, outside, port)
        process = subprocess.Popen(command, env=os.environ | {"HOME": str(tmp_path)})
        try:
            with httpx.Client(base_url=f"https://localhost:{outside}", verify=False) as browser:
                for _ in range(100):
                    with suppress(httpx.TransportError):
                        if browser.get("/healthz").status_code == 200:
                            break
                    time.sleep(0.1)
                origin = {"origin": f"https://localhost:{outside}"}
                for number in range(14):
                    spoofed = origin | {"x-forwarded-for": f"192.0.2.{number}"}
                    wrong = browser.post("/login", data={"token": "x"}, headers=spoofed)
                assert wrong.status_code == 429
                entered = browser.post("/login", data={"token": service.secrets["eve"]}, headers=origin)
                assert entered.status_code == 303
                assert "Secure" in entered.headers["set-cookie"]
                assert "No pending" in browser.get("/").text or "pending request" in browser.get("/").text
                large = browser.post("/login", content=b"token=" + b"x" * (300 << 10), headers=origin)
                assert large.status_code in (413, 502)  # a proxy may report the closed connection as 502
        finally:
            process.kill()
            process.wait(20)


def make_certificate(folder: Path) -> None:
    """Write a self-signed certificate for this machine, valid for a day."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA256())
    (folder / "desk.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "desk.key").write_bytes(key.private_bytes(*private))


def test_the_container_runs_as_a_normal_user_and_writes_to_its_volume_alone() -> None:
    lines = (EXAMPLES.parents[1] / "Containerfile").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line.split()]
    assert ["USER", "10001"] in words
    assert [line[1] for line in words if line[0] == "VOLUME"] == ["/runs"]
    assert "--read-only" in "".join(lines)
    assert words.index(["USER", "10001"]) > max(number for number, line in enumerate(words) if line[0] == "RUN")
    (entry,) = (line for line in lines if line.startswith("ENTRYPOINT"))
    options = json.loads(entry.removeprefix("ENTRYPOINT "))
    assert options[:3] == ["sifu", "serve", "/runs"]
    check_binding(Binding("0.0.0.0", without_tls="--without-tls" in options))


WATCHED = """
import json, os, sys
written = open(sys.argv.pop(1), "a")
def watch(event, arguments):
    writes = event in ("os.mkdir", "os.rename", "os.remove", "sqlite3.connect")
    if event == "open":
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes and isinstance(arguments[0], (str, bytes)):
        print(os.path.abspath(os.fsdecode(arguments[0])), file=written, flush=True)
sys.addaudithook(watch)
from sifu.cli.main import main
main()
"""
"""The command line with an audit hook that logs where it writes."""


@pytest.mark.long
def test_the_command_of_the_container_writes_to_its_volume_alone(tmp_path: Path) -> None:
    """The entry point, environment and health check of the Containerfile run as they are, with a folder in place of
    /runs.
    """
    text = (EXAMPLES.parents[1] / "Containerfile").read_text(encoding="utf-8").replace("/runs", f"{tmp_path}/runs")
    (entry,) = (line.removeprefix("ENTRYPOINT ") for line in text.splitlines() if line.startswith("ENTRYPOINT"))
    (given,) = (line.removeprefix("ENV ") for line in text.splitlines() if line.startswith("ENV"))
    (check,) = (line.removeprefix("HEALTHCHECK CMD ") for line in text.splitlines() if line.startswith("HEALTHCHECK"))
    port, log = free_port(), tmp_path / "written"
    variables = environment() | dict(pair.split("=", 1) for pair in given.split()) | {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    (tmp_path / "runs").mkdir(mode=0o700)
    program = [sys.executable, "-c", WATCHED, str(log)]
    token = ["token", "create", f"{tmp_path}/runs", "--name", "o", "--role", "operator"]
    assert subprocess.run([*program, *token], env=variables, stdout=subprocess.DEVNULL).returncode == 0
    process = subprocess.Popen([*program, *json.loads(entry)[1:], "--port", str(port)], env=variables)
    try:
        healthy = [sys.executable, *json.loads(check.replace("8765", str(port)))[1:]]
        for _ in range(100):
            if subprocess.run(healthy, env=variables, capture_output=True).returncode == 0:
                break
            assert process.poll() is None
        else:
            raise AssertionError("the console does not become healthy")
    finally:
        process.kill()
        process.wait()
    places = {line for line in log.read_text().splitlines() if not line.startswith("/dev/null")}
    inside = {line for line in places if line.startswith((f"{tmp_path}/runs", f"{tmp_path}/tmp", "/tmp/"))}
    assert any(line.startswith(f"{tmp_path}/runs/.sifu-console") for line in inside)  # control: the log records writes
    assert places - inside - {str(log)} == set()


def test_probes_answer_under_any_name_and_tell_nothing(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sifu_console.tokens import TokenFile, state_folder

    stranger = service.stranger()
    for path in ("/healthz", "/readyz"):
        answer = stranger.get(path, headers={"host": "10.0.0.9:8765"})
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert stranger.get("/login", headers={"host": "10.0.0.9:8765"}).status_code == 400  # control
    TokenFile(state_folder(service.folder)).path.write_text("{")
    assert stranger.get("/readyz").status_code == 503
    assert stranger.get("/healthz").status_code == 200
