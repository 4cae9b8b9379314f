"""Real SuperLink and SuperNode processes on loopback, with TLS and node authentication."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from preloaded import STANDS_FOR, write_programs

from free_ports import free_port

BIN = Path(sys.executable).parent
HASTY_NODE = """
import sys, time
usual = time.sleep
time.sleep = lambda seconds: usual(min(seconds, 0.7))
from flwr.supercore import heartbeat
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from flwr.supernode import fleet_http_connection
heartbeat.HEARTBEAT_DEFAULT_INTERVAL = fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = 15
in_memory_corestate.HEARTBEAT_DEFAULT_INTERVAL = sql_corestate.HEARTBEAT_DEFAULT_INTERVAL = 600
from flwr.supernode.cli import flower_supernode
sys.argv[0] = "flower-supernode"
flower_supernode()
"""
"""Flower's own SuperNode with other timings, which are constants in its code. It polls for messages and for a lost
SuperLink more often, and SuperLink gives it up half a minute after a kill; the usual times would double the duration of
these tests. A process for a message has ten minutes instead of half a minute to start, because the machine may be busy.
"""

PATIENCE = 900.0
"""Seconds after which a process counts as hanging. The machine may be busy, so no test may depend on its speed."""

MARK = "SIFU_TEST_DEPLOYMENT"
WARDEN = f"""
import os, pathlib, sys, time
sys.stdin.read()
end, mark = time.monotonic() + 20.0, f"{MARK}={{sys.argv[1]}}".encode()
quiet = 0
while quiet < 2 and time.monotonic() < end:
    quiet += 1
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                os.kill(int(path.parent.name), 9)
                quiet = 0
        except OSError:
            pass
    time.sleep(0.1)
"""
"""Program that waits until the tests have ended, however they ended, and kills every process of their deployment.
Flower's processes outlive the one that started them; the environment they inherit identifies them.
"""


def make_certificates(folder: Path, *addresses: str) -> None:
    """Write an authority (ca.crt) and a certificate (server.pem, server.key) for loopback and `addresses`."""
    now = datetime.datetime.now(datetime.UTC)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    server = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])

    def builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=2))
        )

    ca = builder(authority, authority_key).add_extension(x509.BasicConstraints(True, None), critical=True)
    ca = ca.add_extension(
        x509.KeyUsage(True, False, False, False, False, True, True, False, False), critical=True
    ).add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
    own_addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", *addresses)]
    names = [x509.DNSName("localhost"), *own_addresses]
    own = builder(server, server_key).add_extension(x509.SubjectAlternativeName(names), critical=False)
    own = own.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
    )
    for certificate, name in ((ca, "ca.crt"), (own, "server.pem")):
        signed = certificate.sign(authority_key, hashes.SHA256())
        (folder / name).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


def make_node_key(path: Path) -> None:
    """Write a node's key pair, as ssh-keygen -t ecdsa -b 384 makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    )
    path.chmod(0o600)
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )


def descendants(parent: int) -> list[int]:
    """Return the processes that `parent` started, directly or indirectly."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, after_name = path.read_text().partition("(")[2].rpartition(")")
            script = name.removeprefix(STANDS_FOR)
            children.setdefault(int(after_name.split()[1] if script == name else script), []).append(
                int(path.parent.name)
            )
    processes, look = [], [parent]
    while look:
        new = children.get(look.pop(), [])
        processes += new
        look += new
    return processes


def running(parent: int, program: str) -> list[int]:
    """Return the processes under `parent` that run a program."""
    processes = []
    for descendant in descendants(parent):
        with contextlib.suppress(OSError):
            if program.encode() in Path(f"/proc/{descendant}/cmdline").read_bytes():
                processes.append(descendant)
    return processes


class Deployment:
    """Processes of one federation; `close` ends all of them. `address` is the address at which nodes reach SuperLink.

    SuperLink and SuperNodes start as usual. If `PRELOADED` is set, commands, and the processes that these two
    start, are forks with imported modules, including `ALSO`. `NODE` is the command that starts a SuperNode.
    """

    PRELOADED = True
    ALSO: tuple[str, ...] = ()
    NODE: tuple[object, ...] = (sys.executable, "-c", HASTY_NODE)

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        self.folder, self.address = folder, address
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        mark = uuid.uuid4().hex
        self._warden = subprocess.Popen(
            [sys.executable, "-c", WARDEN, mark], stdin=subprocess.PIPE, start_new_session=True
        )
        self.environment = dict(
            os.environ | {MARK: mark},
            FLWR_TELEMETRY_ENABLED="0",
            FLWR_HOME=str(folder / "flwr"),
            FLWR_SUPEREXEC_TASK_POLL_INTERVAL="0.4",
            OMP_NUM_THREADS="1",
            PATH=f"{folder / 'bin'}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}",
            PYTHONPATH=os.pathsep.join(folder for folder in sys.path if folder),
        )
        if self.PRELOADED:
            write_programs(folder / "bin", f"\0{mark}")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"\0{mark}")
                listener.listen(128)
                program = Path(__file__).with_name("preloaded.py")
                self.start("preloaded", sys.executable, program, *self.ALSO, stdin=listener)
        (folder / "flwr").mkdir()
        make_certificates(folder, address)
        (folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def inside(self, name: str) -> list[str]:
        """Return a command prefix that selects where a process runs; none, because it runs on this machine."""
        return []

    def start(self, name: str, *command: object, stdin: socket.socket | None = None) -> subprocess.Popen[bytes]:
        """Start a process in the background; its output goes to a file named after it."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.inside(name), *map(str, command)], stdin=stdin, stdout=log, stderr=log, env=self.environment,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self.processes[name] = process
        return process

    def call(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Run a command in the foreground."""
        return subprocess.run(
            [*self.inside(""), *map(str, command)], env=self.environment, cwd=self.folder, capture_output=True,
            text=True, timeout=PATIENCE,
        )  # fmt: skip

    def sifu(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a sifu command, as from another terminal."""
        return self.call(self.program("sifu"), *arguments)

    def program(self, name: str) -> Path:
        """Return the path of a command of Flower or sifu."""
        return (self.folder / "bin" if self.PRELOADED else BIN) / name

    def superlink(self) -> None:
        """Start SuperLink and wait until it answers."""
        self.start(
            "superlink", BIN / "flower-superlink", "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem",
            "--ssl-keyfile", "server.key", "--enable-supernode-auth", "--database", self.folder / "superlink.db",
            "--disable-runtime-dependency-installation", "--host", self.listens_on, "--port", self.port,
        )  # fmt: skip
        self.wait_for(self._answers, "superlink")

    @property
    def listens_on(self) -> str:
        """Address to listen on: loopback, unless nodes are elsewhere."""
        return "127.0.0.1" if self.address == "127.0.0.1" else "0.0.0.0"

    def _answers(self) -> bool:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {self.port}), 2)"
        return self.call(sys.executable, "-S", "-c", connect).returncode == 0

    def register(self, key: str) -> None:
        """Register a node's key with SuperLink."""
        ended = self.call(self.program("flwr"), "supernode", "register", self.folder / f"{key}.pub", "here")
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def supernode(self, key: str, config: str) -> None:
        """Start a SuperNode with a key."""
        self.start(
            key, *self.NODE, "--root-certificates", "ca.crt", "--auth-supernode-private-key", key,
            "--superlink", f"{self.address}:{self.port}", "--host", "127.0.0.1", "--port", free_port(),
            "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key",
            "--node-config", config,
        )  # fmt: skip

    def flwr_run(self, app: Path, name: str) -> subprocess.Popen[bytes]:
        """Start a run of the app; return at once."""
        return self.start(name, self.program("flwr"), "run", app, "here", "--stream")

    def kill(self, name: str, number: int) -> None:
        """End a process and its descendants, also in other sessions (a ServerApp outlives its SuperLink)."""
        process = self.processes.pop(name)
        for pid in [process.pid, *descendants(process.pid)] if process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        process.wait(timeout=PATIENCE)

    def wait_for(self, condition: object, what: str) -> None:
        """Wait until the condition holds; on a timeout, show all logs."""
        end = time.monotonic() + PATIENCE
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < end, f"{what} took more than {PATIENCE} s\n{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the end of every process's output."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in self.folder.glob("*.log")
        )

    def close(self) -> None:
        """End all remaining processes."""
        self._warden.communicate(timeout=PATIENCE)
        for process in self.processes.values():
            process.wait(timeout=PATIENCE)
