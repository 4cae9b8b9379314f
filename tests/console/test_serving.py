"""Starting the console: this machine alone unless TLS or a word says otherwise, and never without a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from run_tools import Command
from sifu.console.serving import Binding, check_binding
from sifu.errors import InputError


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
    assert "make a token first" in cli("serve", tmp_path).err
    assert cli("serve", tmp_path / "nowhere").code == 2
    assert "in the clear" in cli("serve", tmp_path, "--host", "0.0.0.0").err
    assert cli("serve", tmp_path, "--port", "99999").code == 2
