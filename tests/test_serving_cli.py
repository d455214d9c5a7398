"""`aspire-llm serve`: options, files, refusals; and the real process from start to SIGTERM."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from aspire_llm.cli import main
from aspire_llm.cli.commands.serve import resolve
from aspire_llm.cli.parser import parse
from aspire_llm.config import EngineConfig
from aspire_llm.errors import UserError
from aspire_llm.serving.server import serve
from aspire_llm.serving.settings import ApiKeys, ServerSettings, make_settings
from saved_model import save_tiny_model


def test_print_config_shows_every_option_and_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "some-model", "--port", "9000", "--max-model-len", "4K", "--print-config"]) == 0
    text = capsys.readouterr().out
    shown = yaml.safe_load(text)
    assert set(shown) == {*EngineConfig.model_fields, *ServerSettings.model_fields}
    assert (shown["model"], shown["port"], shown["max_model_len"]) == ("some-model", 9000, 4096)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert main(["serve", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == text


def test_keys_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-key", "sk-hidden", "--print-config"]) == 0
    assert "sk-hidden" not in capsys.readouterr().out


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: from-file\nmax-model-len: 2K\nport: 1\napi_key: one\nserved_model_name: [a, b]\n")
    config, settings = resolve(parse(["serve", "--config", str(file), "--port", "2"]))
    assert (config.model, config.max_model_len, settings.port) == ("from-file", 2048, 2)
    assert settings.served_model_name == ("a", "b")
    assert ApiKeys(settings).opens(b"Bearer one")
    config, _ = resolve(parse(["serve", "mine", "--config", str(file)]))
    assert config.model == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", ("'prot'", "port")),
        ("port: high", ("port", "'high'")),
        ("port: 70000", ("port", "70000")),
        ("- a", ("names with values",)),
        ("a: [", ("YAML",)),
        ("max_draft_tokens: 0", ("max_draft_tokens", "0")),
        ("log_format: xml", ("log_format", "xml")),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert main(["serve", "--config", str(file), "--print-config"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "absent.yaml"], ("absent.yaml",)),
        (["--port", "x"], ("port", "'x'")),
        (["--prot", "1"], ("--prot", "--port")),
        (["a", "--model", "b"], ("'a'", "'b'")),
        (["--request-timeout", "0"], ("request_timeout", "0")),
        (["--tool-call-parser", "xml"], ("tool_call_parser", "xml")),
        (["--max-body-size", "-1"], ("max_body_size",)),
    ],
)
def test_options_that_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: tuple[str, ...]
) -> None:
    assert main(["serve", *arguments, "--print-config"]) == 2
    line = capsys.readouterr().err
    for word in words:
        assert word in line


def test_the_examples_are_valid() -> None:
    deploy = Path(__file__).parent.parent / "deploy"
    config, settings = resolve(parse(["serve", "--config", str(deploy / "serve.yaml")]))
    assert (config.max_model_len, settings.log_format) == (8192, "json")
    scrape = yaml.safe_load((deploy / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["metrics_path"] == "/metrics"
    for name in ("Dockerfile", "aspire-llm.service"):
        words = (deploy / name).read_text().replace('"', " ").replace(",", " ").split()
        for option in [word for word in words if word in ("--host", "--config", "--api-key-file", "--model")]:
            assert option.removeprefix("--").replace("-", "_") in {
                *EngineConfig.model_fields,
                *ServerSettings.model_fields,
                "config",
            }


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a\n\nsk-b\n")
    keys = ApiKeys(make_settings(api_key_file=str(file)))
    assert [keys.opens(f"Bearer {k}".encode()) for k in ("sk-a", "sk-b", "sk-c", "")] == [True, True, False, False]
    file.write_text("\n")
    with pytest.raises(UserError, match="no key"):
        ApiKeys(make_settings(api_key_file=str(file)))
    with pytest.raises(UserError, match="ASCII"):
        ApiKeys(make_settings(api_key="schlüssel"))


class Process:
    """The real command."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aspire_llm", "serve", "--port", str(self.port), *arguments], stderr=log
            )
        self.url = f"http://127.0.0.1:{self.port}"

    def statuses(self, path: str, until: int) -> list[int]:
        """Asked again and again."""
        seen: list[int] = []
        deadline = time.monotonic() + 90
        while (not seen or seen[-1] != until) and time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                seen.append(httpx.get(self.url + path, timeout=5).status_code)
            time.sleep(0.05)
        return seen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def running(model: Path, tmp_path: Path) -> Iterator[Process]:
    config = tmp_path / "c.yaml"
    config.write_text(
        yaml.safe_dump({"model": str(model), "kv_cache_memory": "8M", "block_size": 16, "log_format": "json"})
    )
    made = Process(
        tmp_path, "--config", str(config), "--served-model-name", "tiny", "--shutdown-grace", "20", "--no-calibrate"
    )
    yield made
    made.process.kill()
    made.process.wait()


def test_from_start_to_sigterm(running: Process) -> None:
    assert running.statuses("/health", 200)[-1] == 200
    body: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=running.url, timeout=60) as client:
        page = client.get("/")
        assert page.status_code == 200
        assert "html" in page.headers["Content-Type"]
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["metrics"]["steps"]["verify"] > 0  # it ended by itself
    assert running.process.wait(30) == 0
    entries = [json.loads(line) for line in running.log.read_text().splitlines()]
    assert any(entry["message"].startswith("ready: ") for entry in entries)
    assert [e["status"] for e in entries if e.get("path") == "/v1/completions"] == [200]


def test_a_model_that_cannot_be_loaded_and_a_port_that_is_taken() -> None:
    def load(_: object) -> Any:
        raise UserError("model 'absent' is not there", "model")

    interval = sys.getswitchinterval()
    with pytest.raises(UserError, match="'absent'"):
        serve(make_settings(port=0), load)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=f"port {taken.getsockname()[1]}") as refused:
            serve(make_settings(port=taken.getsockname()[1]), load)
        assert refused.value.parameter == "port"
    for options in ({"ssl_certfile": "absent.pem"}, {"ssl_keyfile": "alone.pem"}):
        with pytest.raises(UserError, match=next(iter(options))):
            serve(make_settings(port=0, **options), load)
    with pytest.raises(UserError, match="host"):
        serve(make_settings(host="no.such.host.invalid"), load)
    sys.setswitchinterval(interval)
